# The compiler of nvcc's host code: CXX. nvcc alone would take the g++ of PATH, whatever CXX names.
if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX} AND NOT CMAKE_CXX_COMPILER_ARG1)
  set(ENV{CUDAHOSTCXX} "${CMAKE_CXX_COMPILER}")
endif()
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CUDA_STANDARD 17)

# CUDA 13.0 names g++ up to 15. It compiles with 16 as well, without a syntax of C++23 that libstdc++
# uses everywhere but under clang. The GPU's code is the same.
set(_trials "")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 16)
  set(_trials "-allow-unsupported-compiler -std=c++17 -D_GLIBCXX_CLANG=1")
  string(APPEND CMAKE_CUDA_FLAGS " ${_trials}")
endif()
# For CMake's own trials of nvcc. CUDA 13.0 and glibc 2.42 declare rsqrt differently, which nvcc takes
# from system headers alone; the kernels get CUDA's as such.
if(DEFINED ENV{CUDACXX})
  cmake_path(SET _root NORMALIZE "$ENV{CUDACXX}/../..")
  string(APPEND _trials " -isystem ${_root}/include -isystem ${_root}/targets/x86_64-linux/include")
endif()
set(ENV{NVCC_PREPEND_FLAGS} "${_trials} $ENV{NVCC_PREPEND_FLAGS}")

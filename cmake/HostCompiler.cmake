# The compiler of nvcc's host code: CXX. nvcc alone would take the g++ of PATH, whatever CXX names.
if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX} AND NOT CMAKE_CXX_COMPILER_ARG1)
  set(ENV{CUDAHOSTCXX} "${CMAKE_CXX_COMPILER}")
endif()
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CUDA_STANDARD 17)

set(_flags "")
# CUDA 13.0 names g++ up to 15. It compiles with 16 as well, without a syntax of C++23 that libstdc++
# uses everywhere but under clang. The GPU's code is the same.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 16)
  set(_flags "-allow-unsupported-compiler -std=c++17 -D_GLIBCXX_CLANG=1")
endif()
# CUDA 13.0 and glibc 2.42 declare rsqrt differently, which nvcc takes from system headers alone.
if(DEFINED ENV{CUDACXX} AND NOT CMAKE_CROSSCOMPILING)
  set(_root "$ENV{CUDACXX}")
  cmake_path(GET _root PARENT_PATH _root)
  cmake_path(GET _root PARENT_PATH _root)
  foreach(_folder IN ITEMS include targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include)
    if(EXISTS "${_root}/${_folder}/cuda_runtime.h")
      string(APPEND _flags " -isystem ${_root}/${_folder}")
    endif()
  endforeach()
endif()
string(APPEND CMAKE_CUDA_FLAGS " ${_flags}")
set(ENV{NVCC_PREPEND_FLAGS} "${_flags} $ENV{NVCC_PREPEND_FLAGS}") # CMake's own trials of nvcc

# Links _C.so against glibc 2.28 on any machine, without Docker: zig brings link-time stubs of that
# glibc. libstdc++ and libgcc_s stay shared, as torch's are: an exception thrown here is caught in
# torch (docs/adr/0004).
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|aarch64)$")
  message(FATAL_ERROR "The target: expected Linux on x86_64 or aarch64, got ${CMAKE_SYSTEM_NAME} on "
                      "${CMAKE_SYSTEM_PROCESSOR}. Wheels of others are not linked or tested yet.")
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util as u; s = u.find_spec('ziglang'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE _zig OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
find_program(FAD_ZIG zig HINTS "${_zig}" NO_DEFAULT_PATH)
if(NOT FAD_ZIG)
  message(FATAL_ERROR "the package ziglang is not installed for ${Python_EXECUTABLE}: "
                      "pip install ziglang (nox -s build does it)")
endif()
set(_zig_env "${CMAKE_COMMAND}" -E env "ZIG_GLOBAL_CACHE_DIR=${CMAKE_BINARY_DIR}/zig"
             "ZIG_LOCAL_CACHE_DIR=${CMAKE_BINARY_DIR}/zig")
list(JOIN _zig_env " " _zig_env)
set(CMAKE_CXX_CREATE_SHARED_MODULE
    "${_zig_env} ${FAD_ZIG} cc -target ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.2.28 -shared <LINK_FLAGS> -o <TARGET> <OBJECTS> <LINK_LIBRARIES>")
set_target_properties(fad_ops PROPERTIES LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None
                                         BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")

# torch's libraries by name only: their functions come from the torch that is loaded already.
# torch_shims.txt is the whole of torch's C interface that we call.
file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/cpp/ops/torch_shims.txt" _shims REGEX "^[a-z]")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             "${CMAKE_CURRENT_SOURCE_DIR}/cpp/ops/torch_shims.txt")
list(TRANSFORM _shims REPLACE "(.+)" "void \\1(void) {}" OUTPUT_VARIABLE _bodies)
list(JOIN _bodies "\n" _bodies)
foreach(_library IN ITEMS torch_cpu torch_cuda)
  set(_stub "${FAD_GENERATED_DIR}/stub_${_library}.cpp")
  file(CONFIGURE OUTPUT "${_stub}" CONTENT "extern \"C\" {\n${_bodies}\n}\n" @ONLY)
  add_library(fad_stub_${_library} SHARED "${_stub}")
  set_target_properties(
    fad_stub_${_library} PROPERTIES OUTPUT_NAME ${_library} LIBRARY_OUTPUT_DIRECTORY
                                    "${CMAKE_BINARY_DIR}/stubs" EXCLUDE_FROM_ALL ON)
  set(_bodies "") # libtorch_cuda need only be named: it brings libtorch_cpu with it
endforeach()

separate_arguments(_cxx_words NATIVE_COMMAND "${CMAKE_CXX_COMPILER_ARG1}")
foreach(_library IN ITEMS libstdc++.so.6 libgcc_s.so.1)
  execute_process(
    # The second is there where CXX holds a launcher: "ccache g++".
    COMMAND "${CMAKE_CXX_COMPILER}" ${_cxx_words} -print-file-name=${_library}
    OUTPUT_VARIABLE _path OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  list(APPEND _cxx_runtime "${_path}")
endforeach()

target_compile_options(
  fad_ops PRIVATE "SHELL:-include ${CMAKE_CURRENT_SOURCE_DIR}/cpp/ops/libstdcxx_2_28.h")

find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES "") # the one library of theirs is named in full below
target_link_libraries(
  fad_ops
  PRIVATE
    # Static: works whatever CUDA runtime torch brings, or none.
    "${CUDA_cudart_static_LIBRARY}"
    # Named even if nothing seems to need them.
    -Wl,--no-as-needed fad_stub_torch_cpu fad_stub_torch_cuda ${_cxx_runtime}
    -lm -ldl -lpthread -lrt)
target_link_options(
  fad_ops
  PRIVATE
    "-Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cpp/ops/exports.map"
    -Wl,-s          # symbols name temporary files, which differ from build to build
    -Wl,--build-id=none
    -Wl,--gc-sections
    -Wl,-z,defs)    # every torch function used is in torch_shims.txt, every glibc one in 2.28

# torch's headers, without torch's libraries: the ops speak its stable C ABI only, so any
# torch >= FAD_TORCH_TARGET runs them. torch is found, never imported.
set(FAD_TORCH_TARGET "2.10")
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE _torch OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
find_path(FAD_TORCH_INCLUDE_DIR torch/csrc/stable/library.h
          HINTS "${_torch}/include" NO_DEFAULT_PATH)
if(NOT FAD_TORCH_INCLUDE_DIR)
  message(
    FATAL_ERROR
      "torch's headers not found for ${Python_EXECUTABLE}. `nox -s build` makes a wheel and brings "
      "all it needs. pip builds in an environment of its own, without torch; to build with pip:\n"
      "  pip install --group build\n"
      "  pip install --no-deps 'torch>=${FAD_TORCH_TARGET}'  (only its headers are read)\n"
      "  pip install --no-build-isolation --no-deps .")
endif()

add_library(fad_torch INTERFACE)
target_include_directories(fad_torch SYSTEM INTERFACE "${FAD_TORCH_INCLUDE_DIR}")
string(REPLACE "." ";" _version "${FAD_TORCH_TARGET}")
list(GET _version 0 _major)
list(GET _version 1 _minor)
math(EXPR _target "(${_major} << 56) | (${_minor} << 48)" OUTPUT_FORMAT HEXADECIMAL)
# USE_CUDA declares the shim that returns the current CUDA stream.
target_compile_definitions(fad_torch INTERFACE TORCH_TARGET_VERSION=${_target} USE_CUDA)
# Checks in torch's headers name their files, which lie wherever torch is installed.
target_compile_options(fad_torch INTERFACE "-ffile-prefix-map=${FAD_TORCH_INCLUDE_DIR}=torch")

# _build_info.json: what the wheel says of itself, read by `flash-attn-deterministic info` and by
# the functions that refuse a call this wheel has no kernel for.
set(FAD_BUILD_INFO "${FAD_GENERATED_DIR}/_build_info.json")
string(JSON _upstream REMOVE "${FAD_UPSTREAM_JSON}" dest)
string(JSON _upstream SET "${_upstream}" name "\"flash-attn\"")
# Hashed at configuring, which every build of a wheel begins with.
execute_process(
  COMMAND "${CMAKE_COMMAND}" -E env --modify "PYTHONPATH=path_list_prepend:${CMAKE_SOURCE_DIR}/python"
          "${Python_EXECUTABLE}"
          -m flash_attn_build.compile.sources
  OUTPUT_VARIABLE _sources OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
set(_info "{}")
string(JSON _info SET "${_info}" schema 1)
string(JSON _info SET "${_info}" bits_version ${FAD_BITS_VERSION})
string(JSON _info SET "${_info}" upstream "${_upstream}")
string(JSON _info SET "${_info}" cuda_toolkit "\"${CMAKE_CUDA_COMPILER_VERSION}\"")
list(JOIN CMAKE_CUDA_ARCHITECTURES "\", \"" _architectures)
string(JSON _info SET "${_info}" architectures "[\"${_architectures}\"]")
set(_deterministic false)
if(FLASH_ATTENTION_DETERMINISTIC)
  set(_deterministic true)
endif()
string(JSON _info SET "${_info}" deterministic ${_deterministic})
string(JSON _info SET "${_info}" torch_target "\"${FAD_TORCH_TARGET}\"")
string(JSON _info SET "${_info}" tiles "${FAD_TILES_JSON}")
string(JSON _info SET "${_info}" instances "${FAD_INSTANCES_JSON}")
string(JSON _info SET "${_info}" sources "${_sources}")
file(WRITE "${FAD_BUILD_INFO}" "${_info}\n")

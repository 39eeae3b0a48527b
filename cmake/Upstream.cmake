# Upstream's sources: fetched by name, checked against the pin, patched (flash_attn_build.upstream).
set(FAD_UPSTREAM_DIR "${CMAKE_BINARY_DIR}/upstream")
execute_process(
  COMMAND "${CMAKE_COMMAND}" -E env --modify "PYTHONPATH=path_list_prepend:${CMAKE_SOURCE_DIR}/python"
          "${Python_EXECUTABLE}"
          -m flash_attn_build.upstream prepare --dest "${FAD_UPSTREAM_DIR}"
  WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}" # FLASH_ATTENTION_SOURCE may be a relative path
  OUTPUT_VARIABLE _output OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE _status)
if(NOT _status EQUAL 0)
  message(FATAL_ERROR "preparing upstream's sources failed (exit status ${_status}); see above")
endif()
string(REGEX REPLACE ".*\n" "" FAD_UPSTREAM_JSON "${_output}") # the last line
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             "${CMAKE_SOURCE_DIR}/cpp/upstream/upstream.json")
file(GLOB _patches CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/cpp/upstream/patches/*.patch")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_patches})

add_library(fad_upstream INTERFACE)
# torch_free comes first: it stands in for the three torch headers that upstream includes.
target_include_directories(
  fad_upstream SYSTEM INTERFACE "${CMAKE_SOURCE_DIR}/cpp/torch_free"
                                "${FAD_UPSTREAM_DIR}/flash_attn/src"
                                "${FAD_UPSTREAM_DIR}/cutlass/include"
                                ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})

# How many CUDA compilations run at once: MAX_JOBS, or what the cores and the memory allow. A Ninja
# pool, so that it holds for every way of starting a build.
execute_process(
  COMMAND "${CMAKE_COMMAND}" -E env --modify "PYTHONPATH=path_list_prepend:${CMAKE_SOURCE_DIR}/python"
          "${Python_EXECUTABLE}"
          -m flash_attn_build.compile.jobs
  OUTPUT_VARIABLE _jobs OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
if(NOT CMAKE_GENERATOR MATCHES "Ninja")
  message(FATAL_ERROR "CMake's generator: expected Ninja, which alone keeps the number of "
                      "compilations within MAX_JOBS and the memory; got ${CMAKE_GENERATOR}. "
                      "Add -G Ninja, or unset CMAKE_GENERATOR.")
endif()
set_property(GLOBAL APPEND PROPERTY JOB_POOLS "fad_cuda=${_jobs}")
message(STATUS "CUDA compilations at once: ${_jobs}")

# How many CUDA compilations run at once: MAX_JOBS, or what the cores and the memory allow. A Ninja
# pool, so that it holds for every way of starting a build.
execute_process(
  COMMAND "${CMAKE_COMMAND}" -E env --modify "PYTHONPATH=path_list_prepend:${CMAKE_SOURCE_DIR}/python"
          "${Python_EXECUTABLE}"
          -m flash_attn_build.compile.jobs
  OUTPUT_VARIABLE _jobs OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
set_property(GLOBAL APPEND PROPERTY JOB_POOLS "fad_cuda=${_jobs}")
message(STATUS "CUDA compilations at once: ${_jobs}")

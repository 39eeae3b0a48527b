# CUDA code is compiled once, to the PTX of the lowest architecture asked for, and that PTX is
# assembled for each of them: the front end is nine tenths of the cost of a kernel, upstream's
# kernels use nothing above sm_80, and bits and speed on the H200 are the same (docs/adr/0005).
# The sm90 family alone uses what 9.0 has and no other capability: its sources are compiled for 90a,
# to machine code, and for nothing else. Kernels for e4m3 keys are compiled anew for capabilities from
# 8.9 on, which have instructions for them.
get_target_property(_flags fad_kernels COMPILE_OPTIONS)
set(_every_gpu ${CMAKE_CUDA_ARCHITECTURES})
list(REMOVE_ITEM _every_gpu 90a-real)
if(NOT _every_gpu)
  message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected one that all kernels are built for, such "
                      "as 90-real, beside 90a-real")
endif()
set(_numbers ${_every_gpu})
list(TRANSFORM _numbers REPLACE "-(real|virtual)$" "")
list(SORT _numbers COMPARE NATURAL)
list(GET _numbers 0 _lowest)

set(_codes "")
set(_newer_ptx "")
foreach(_architecture IN LISTS _every_gpu)
  if(NOT _architecture MATCHES "^([0-9]+)(-real|-virtual)?$")
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected numbers like 80, 80-real or 80-virtual, "
                        "or 90a-real, got ${_architecture}")
  endif()
  set(_number "${CMAKE_MATCH_1}")
  set(_kind "${CMAKE_MATCH_2}")
  if(NOT _kind STREQUAL "-virtual")
    list(APPEND _codes "sm_${_number}")
  endif()
  if(NOT _kind STREQUAL "-real")
    if(_number STREQUAL _lowest)
      list(APPEND _codes "compute_${_number}")
    else() # PTX of its own: the front end runs once more
      list(APPEND _newer_ptx "arch=compute_${_number},code=[compute_${_number}]")
    endif()
  endif()
endforeach()
list(JOIN _codes "," _codes)

# Further arguments: what to compile a target for.
function(fad_compile_for name)
  foreach(_option IN LISTS ARGN)
    target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=${_option}>")
  endforeach()
endfunction()

set_target_properties(fad_kernels PROPERTIES CUDA_ARCHITECTURES OFF)
fad_compile_for(fad_kernels ${_newer_ptx} "arch=compute_${_lowest},code=[${_codes}]")

# Sources that are compiled for other architectures than the rest.
function(fad_other_kernels name sources)
  if(NOT sources)
    return()
  endif()
  add_library(${name} OBJECT ${sources})
  target_link_libraries(${name} PRIVATE fad_kernels)
  target_compile_options(${name} PRIVATE ${_flags})
  fad_compile_for(${name} ${ARGN})
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES OFF JOB_POOL_COMPILE fad_cuda
                                           POSITION_INDEPENDENT_CODE ON)
endfunction()

fad_other_kernels(fad_kernels_sm90 "${FAD_SM90_SOURCES}" "arch=compute_90a,code=[sm_90a]")

set(_options ${_newer_ptx})
set(_codes_below "")
string(REPLACE "," ";" _codes "${_codes}")
foreach(_code IN LISTS _codes)
  string(REGEX MATCH "[0-9]+" _number "${_code}")
  if(_number GREATER_EQUAL 89 AND _code MATCHES "^sm_")
    list(APPEND _options "arch=compute_${_number},code=[${_code}]")
  else()
    list(APPEND _codes_below "${_code}")
  endif()
endforeach()
if(_codes_below)
  list(JOIN _codes_below "," _codes_below)
  list(PREPEND _options "arch=compute_${_lowest},code=[${_codes_below}]")
endif()
fad_other_kernels(fad_kernels_fp8 "${FAD_FP8_SOURCES}" ${_options})

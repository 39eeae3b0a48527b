# CUDA code is compiled once, to the PTX of the lowest architecture asked for, and that PTX is
# assembled for each of them: the front end is nine tenths of the cost of a kernel, upstream's
# kernels use nothing above sm_80, and bits and speed on the H200 are the same (docs/adr/0005).
# The sm90 family alone uses what 9.0 has and no other capability: its sources are compiled for 90a,
# to machine code, and for nothing else.
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
      target_compile_options(
        fad_kernels
        PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_${_number},code=[compute_${_number}]>")
    endif()
  endif()
endforeach()
list(JOIN _codes "," _codes)

set_target_properties(fad_kernels PROPERTIES CUDA_ARCHITECTURES OFF)
target_compile_options(
  fad_kernels
  PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_${_lowest},code=[${_codes}]>")

if(FAD_SM90_SOURCES)
  add_library(fad_kernels_sm90 OBJECT ${FAD_SM90_SOURCES})
  target_link_libraries(fad_kernels_sm90 PRIVATE fad_kernels)
  target_compile_options(
    fad_kernels_sm90
    PRIVATE ${_flags} "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_90a,code=[sm_90a]>")
  set_target_properties(fad_kernels_sm90 PROPERTIES CUDA_ARCHITECTURES OFF
                                                    JOB_POOL_COMPILE fad_cuda
                                                    POSITION_INDEPENDENT_CODE ON)
endif()

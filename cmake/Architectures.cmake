# CUDA code is compiled once, to the PTX of the lowest architecture asked for, and that PTX is
# assembled for each of them: the front end is nine tenths of the cost of a kernel, upstream's
# kernels use nothing above sm_80, and bits and speed on the H200 are the same (docs/adr/0005).
# The sm90 family alone uses what 9.0 has and no other capability: its sources are compiled for 90a,
# to machine code, and for nothing else. Kernels that start while another one runs
# (sm80/kernel_order.h) use what 9.0 and all above have: they are compiled twice.
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
set(_codes_below_90 "") # of the lowest PTX too; the rest is made of PTX for 9.0
set(_codes_from_90 "")
set(_own_ptx "")
foreach(_architecture IN LISTS _every_gpu)
  if(NOT _architecture MATCHES "^([0-9]+)(-real|-virtual)?$")
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected numbers like 80, 80-real or 80-virtual, "
                        "or 90a-real, got ${_architecture}")
  endif()
  set(_number "${CMAKE_MATCH_1}")
  set(_kind "${CMAKE_MATCH_2}")
  if(NOT _kind STREQUAL "-virtual")
    list(APPEND _codes "sm_${_number}")
    if(_number LESS 90)
      list(APPEND _codes_below_90 "sm_${_number}")
    else()
      list(APPEND _codes_from_90 "sm_${_number}")
    endif()
  endif()
  if(NOT _kind STREQUAL "-real")
    if(_number STREQUAL _lowest)
      list(APPEND _codes "compute_${_number}")
      list(APPEND _codes_below_90 "compute_${_number}")
    else() # PTX of its own: the front end runs once more
      list(APPEND _own_ptx "${_number}")
    endif()
  endif()
endforeach()

# Compiles a target's CUDA code to the PTX of one architecture, and that to all of the codes.
function(fad_generate_code target ptx codes)
  list(JOIN codes "," codes)
  target_compile_options(
    ${target}
    PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_${ptx},code=[${codes}]>")
endfunction()

set_target_properties(fad_kernels PROPERTIES CUDA_ARCHITECTURES OFF)
fad_generate_code(fad_kernels "${_lowest}" "${_codes}")

add_library(fad_kernels_early OBJECT ${FAD_EARLY_SOURCES})
target_link_libraries(fad_kernels_early PRIVATE fad_kernels)
target_compile_options(fad_kernels_early PRIVATE ${_flags})
set_target_properties(fad_kernels_early PROPERTIES CUDA_ARCHITECTURES OFF
                                                   JOB_POOL_COMPILE fad_cuda
                                                   POSITION_INDEPENDENT_CODE ON)
if(_lowest LESS 90)
  fad_generate_code(fad_kernels_early "${_lowest}" "${_codes_below_90}")
  if(_codes_from_90)
    fad_generate_code(fad_kernels_early 90 "${_codes_from_90}")
  endif()
else()
  fad_generate_code(fad_kernels_early "${_lowest}" "${_codes}")
endif()

foreach(_target IN ITEMS fad_kernels fad_kernels_early)
  foreach(_number IN LISTS _own_ptx)
    fad_generate_code(${_target} ${_number} "compute_${_number}")
  endforeach()
endforeach()

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

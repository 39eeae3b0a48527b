# Kernels compress to about a fifth, and unpack once, at the first launch. The driver unpacks them, so
# the format must be one that the oldest driver of the toolkit's series reads (docs/adr/0013): CUDA
# 12's "size" and "balance" want driver 550, "speed" is read from 525 on; CUDA 13 starts at 580.
set(_mode "${FLASH_ATTENTION_COMPRESS_MODE}")
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  if(_mode)
    message(FATAL_ERROR "FLASH_ATTENTION_COMPRESS_MODE: nvcc ${CMAKE_CUDA_COMPILER_VERSION} has no "
                        "--compress-mode (12.8 and newer do); leave it empty, got ${_mode}")
  endif()
  set(_compress "-Xfatbin=-compress-all") # the one format there was
elseif(_mode)
  set(_compress "--compress-mode=${_mode}")
elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
  set(_compress "--compress-mode=speed")
else()
  set(_compress "--compress-mode=size")
endif()
target_compile_options(fad_kernels PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${_compress}>")

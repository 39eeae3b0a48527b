# Compiles on x86_64 for aarch64: host code by Debian's cross compiler, device code by this machine's
# nvcc. CUDA's libraries for aarch64 lie in the toolkit's targets/sbsa-linux.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_FLAGS_INIT -target-dir=sbsa-linux)

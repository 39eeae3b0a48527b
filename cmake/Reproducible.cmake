# The same sources give the same bytes, whatever folder they are built in.
add_library(fad_reproducible INTERFACE)
target_compile_options(
  fad_reproducible
  INTERFACE
    # __FILE__ and friends start at the source and build folders, not at the root of this machine.
    $<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${CMAKE_SOURCE_DIR}=.>
    $<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${CMAKE_BINARY_DIR}=build>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${CMAKE_SOURCE_DIR}=.>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${CMAKE_BINARY_DIR}=build>)

# nvcc draws the names of internal symbols at random unless it is given a seed, and hashes the
# absolute path of the source into them unless the front ends are told another one.
function(fad_reproducible_source source name)
  set_source_files_properties(
    "${source}"
    PROPERTIES
      COMPILE_OPTIONS
      "-frandom-seed=${name};-Xcudafe;--orig_src_path_name=${name}.cu;-Xcicc;--orig_src_path_name=${name}.cu"
  )
endfunction()

// The shared memory of the one-CTA path, for its kernels and for the host that picks a path.
#pragma once

#include <initializer_list>

namespace fad {

struct StateRoom {
  int tile_bytes;  // a block of queries, of keys and of values, in 16 bit
  int columns;     // eights of columns of the accumulator that wait in shared memory
  int bytes;       // of the tile and all that waits
};

// The state of the later splits waits in fp32: block_m * 32 bytes for each eight columns of the
// accumulator, and once more as much for maximum and sum of the rows. At least half of the columns
// must wait here, as the output's rows (16 bit) hold no more than half; each one more saves a way
// to L2 and back. So they get what two CTAs to an SM leave on compute capability 8.0 (164 KB, 1 KB
// of them the system's for each CTA), or else on 9.0 (228 KB), or else what one CTA leaves on 8.0.
// No bits depend on it.
constexpr StateRoom state_room(int head_dim, int block_m, int block_n) {
  constexpr int kNote = 16;  // see WaitingState
  const int tile_bytes = (block_m + 2 * block_n) * head_dim * 2;
  const int column_bytes = block_m * 32;
  const int all = head_dim / 8;
  int columns = 0;
  for (const int kb : {81, 113, 163}) {
    if (2 * columns < all) {
      columns = (kb * 1024 - tile_bytes - kNote) / column_bytes - 1;
    }
  }
  columns = columns < all ? columns : all;
  return {tile_bytes, columns, tile_bytes + kNote + (columns + 1) * column_bytes};
}

}  // namespace fad

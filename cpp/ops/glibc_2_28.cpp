// What newer toolchains take from a newer C library, for the oldest one that the wheel promises.

// glibc 2.32: libstdc++'s shared_ptr reads it to skip atomics in a process of one thread. Zero says
// "there may be more", which is always true enough. Hidden, so that it is ours alone.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

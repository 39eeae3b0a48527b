// Included ahead of every source of the ops: keeps out what newer versions of libstdc++ would
// import, and manylinux_2_28 does not have.
#pragma once

#include <cstddef>

// Templates such as std::stringstream are instantiated here instead of being imported: their newest
// members are of GLIBCXX_3.4.26. libstdc++ reads the macro from its configuration header.
#ifdef _GLIBCXX_EXTERN_TEMPLATE
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#endif

#include <istream>
#include <ostream>

// torch's headers include <iostream>, whose initialiser of the streams is of GLIBCXX_3.4.32 since
// GCC 13. This stands for that header; torch names one of its streams, and we use none.
#define _GLIBCXX_IOSTREAM 1
namespace std {
extern ostream cerr;
}

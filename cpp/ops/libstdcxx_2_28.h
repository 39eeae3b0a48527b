// Included ahead of every source of the ops. Templates such as std::stringstream are instantiated
// here instead of being imported: their newest members carry symbol versions (GLIBCXX_3.4.26) that
// manylinux_2_28 does not have. libstdc++ reads the macro from this configuration header.
#pragma once

#include <cstddef>

#ifdef _GLIBCXX_EXTERN_TEMPLATE
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#endif

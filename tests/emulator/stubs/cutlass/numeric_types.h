// Stands in for the header of this name: fast_math.h has what is used.
#pragma once

#include "fast_math.h"

// Functions that Python finds in the library by name.
#pragma once

#define RBLN_EXPORT extern "C" __attribute__((visibility("default")))

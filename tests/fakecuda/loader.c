/* How cuda-bindings finds the calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "fakecuda.h"

/* The newest variant of a call that this library exports; NULL for what is not emulated. */
static void *find_symbol(const char *name)
{
    static const char *const suffixes[] = {"_v4", "_v3", "_v2", ""};
    char full[128];
    Dl_info self;
    if (strncmp(name, "cu", 2) || !dladdr((void *)find_symbol, &self)) return NULL;
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    void *found = NULL;
    for (size_t i = 0; library && !found && i < sizeof suffixes / sizeof *suffixes; i++) {
        snprintf(full, sizeof full, "%s%s", name, suffixes[i]);
        found = dlsym(library, full);
    }
    if (library) dlclose(library);
    return found;
}

/* Rule: a driver lacks the calls of later versions; for a missing call it returns NULL. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                                    int *status)
{
    (void)flags;
    if (!name || !address) return CUDA_ERROR_INVALID_VALUE;
    bool too_new = version > knobs()->version;
    *address = too_new ? NULL : find_symbol(name);
    if (status)
        *status = *address  ? CU_GET_PROC_ADDRESS_SUCCESS
                  : too_new ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                            : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *address ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

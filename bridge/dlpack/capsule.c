// Python capsules around DLManagedTensor. Called through ctypes.PyDLL, that is, with Python's lock held. The capsule functions are looked
// up in the process, so that this package also links where there is no Python.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#include "dlpack.h"

typedef void *(*capsule_get)(void *capsule, const char *name);
typedef int (*capsule_rename)(void *capsule, const char *name);
typedef void *(*capsule_new)(void *pointer, const char *name, void (*destructor)(void *));
typedef int (*capsule_valid)(void *capsule, const char *name);

// The address of the tensor in a "dltensor" capsule, which is renamed to "used_dltensor": the caller owns the tensor from
// now on. 0 with a Python exception set when the object is no such capsule.
int64_t eae_capsule_take(void *capsule) {
  static capsule_get get;
  static capsule_rename rename;
  if (get == NULL) {
    rename = (capsule_rename)dlsym(RTLD_DEFAULT, "PyCapsule_SetName");
    get = (capsule_get)dlsym(RTLD_DEFAULT, "PyCapsule_GetPointer");
    if (get == NULL || rename == NULL) {
      get = NULL;
      return 0;
    }
  }
  void *tensor = get(capsule, "dltensor");
  if (tensor == NULL || rename(capsule, "used_dltensor") != 0) {
    return 0;
  }
  return (int64_t)(intptr_t)tensor;
}

// Runs when a capsule dies. One that nobody has taken over still owns its tensor.
static void eae_capsule_destroy(void *capsule) {
  static capsule_get get;
  static capsule_valid valid;
  if (get == NULL) {
    valid = (capsule_valid)dlsym(RTLD_DEFAULT, "PyCapsule_IsValid");
    get = (capsule_get)dlsym(RTLD_DEFAULT, "PyCapsule_GetPointer");
  }
  if (valid(capsule, "dltensor")) {
    eae_dl_delete((DLManagedTensor *)get(capsule, "dltensor"));
  }
}

// A new "dltensor" capsule that owns the tensor at that address; NULL with a Python exception set when there is no memory for it.
void *eae_capsule_make(int64_t address) {
  static capsule_new make;
  if (make == NULL) {
    make = (capsule_new)dlsym(RTLD_DEFAULT, "PyCapsule_New");
    if (make == NULL) {
      return NULL;
    }
  }
  return make((void *)(intptr_t)address, "dltensor", eae_capsule_destroy);
}

// Python capsules around DLManagedTensor, as two Python functions `take(capsule) -> address` and `make(address) -> capsule`. They work on
// Python objects and are called with Python's lock held. Python's functions are looked up in the process, so that this package also
// links where there is no Python.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#include "dlpack.h"

// The head of PyMethodDef, which is part of Python's stable ABI.
typedef struct {
  const char *name;
  void *(*call)(void *self, void *argument);
  int flags;
  const char *doc;
} method;

enum { METH_O = 0x0008 };

static struct {
  void *(*get)(void *capsule, const char *name);
  int (*rename)(void *capsule, const char *name);
  void *(*make)(void *pointer, const char *name, void (*destructor)(void *));
  int (*valid)(void *capsule, const char *name);
  void *(*from_address)(long long value);
  long long (*to_address)(void *number);
  void *(*error)(void);
  void *(*function)(method *definition, void *self, void *module);
} py;

// The address of the tensor in a "dltensor" capsule, which is renamed to "used_dltensor": the caller owns the tensor from
// now on. ValueError when the object is no such capsule.
static void *take(void *self, void *capsule) {
  (void)self;
  void *tensor = py.get(capsule, "dltensor");
  if (tensor == NULL || py.rename(capsule, "used_dltensor") != 0) {
    return NULL;
  }
  return py.from_address((long long)(intptr_t)tensor);
}

// Runs when a capsule dies. One that nobody has taken over still owns its tensor.
static void destroy(void *capsule) {
  if (py.valid(capsule, "dltensor")) {
    eae_dl_delete((DLManagedTensor *)py.get(capsule, "dltensor"));
  }
}

// A new "dltensor" capsule that owns the tensor at that address.
static void *make(void *self, void *address) {
  (void)self;
  long long number = py.to_address(address);
  if (number == -1 && py.error() != NULL) {
    return NULL;
  }
  return py.make((void *)(intptr_t)number, "dltensor", destroy);
}

static method methods[] = {
    {"take", take, METH_O, "take(capsule) -> address"},
    {"make", make, METH_O, "make(address) -> capsule"},
};

// `take` (0) or `make` (1) as a Python function, a new reference; NULL where there is no Python in the process. A call through
// ctypes costs ten times as much as one of these.
void *eae_capsule_function(int which) {
  if (py.function == NULL) {
    py.get = dlsym(RTLD_DEFAULT, "PyCapsule_GetPointer");
    py.rename = dlsym(RTLD_DEFAULT, "PyCapsule_SetName");
    py.make = dlsym(RTLD_DEFAULT, "PyCapsule_New");
    py.valid = dlsym(RTLD_DEFAULT, "PyCapsule_IsValid");
    py.from_address = dlsym(RTLD_DEFAULT, "PyLong_FromLongLong");
    py.to_address = dlsym(RTLD_DEFAULT, "PyLong_AsLongLong");
    py.error = dlsym(RTLD_DEFAULT, "PyErr_Occurred");
    if (!py.get || !py.rename || !py.make || !py.valid || !py.from_address || !py.to_address || !py.error) {
      return NULL;
    }
    py.function = dlsym(RTLD_DEFAULT, "PyCFunction_NewEx");
  }
  return py.function == NULL ? NULL : py.function(&methods[which], NULL, NULL);
}

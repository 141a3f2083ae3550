#define _GNU_SOURCE
#include "libtorch.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The version that the calls are written for, as torch packs it: 2.10.
#define EAE_TORCH_VERSION (((uint64_t)2 << 56) | ((uint64_t)10 << 48))

typedef int32_t status;

static void *library;
static struct {
  status (*call)(const char *, const char *, uint64_t *, uint64_t);
  status (*view)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, void **);
  status (*share)(void *, void **);
  status (*delete)(void *);
  status (*data)(void *, void **);
  status (*dim)(void *, int64_t *);
  status (*sizes)(void *, int64_t **);
  status (*strides)(void *, int64_t **);
  status (*dtype)(void *, int32_t *);
  status (*device_type)(void *, int32_t *);
  status (*device_index)(void *, int32_t *);
  status (*copy)(void *, void *, int32_t);
  bool (*grad_enabled)(void);
  void (*set_grad)(bool);
  // Optional: torch 2.13 and later.
  const char *(*what)(void);
  status (*new_value)(uint64_t **);
} torch;

static char *text(const char *format, const char *detail) {
  char *made = NULL;
  if (asprintf(&made, format, detail) < 0) {
    abort();
  }
  return made;
}

char *eae_torch_open(const char *path, int load) {
  if (library != NULL) {
    return NULL;
  }
  void *opened = dlopen(path, RTLD_NOLOAD | RTLD_NOW);
  if (opened == NULL && load) {
    opened = dlopen(path, RTLD_NOW);
  }
  if (opened == NULL) {
    const char *detail = dlerror();
    return text("torch's library is not in this process: %s", detail != NULL ? detail : path);
  }
  const struct {
    void **slot;
    const char *name;
    bool needed;
  } wanted[] = {
      {(void **)&torch.call, "torch_call_dispatcher", true},
      {(void **)&torch.view, "aoti_torch_create_tensor_from_blob", true},
      {(void **)&torch.share, "aoti_torch_new_tensor_handle", true},
      {(void **)&torch.delete, "aoti_torch_delete_tensor_object", true},
      {(void **)&torch.data, "aoti_torch_get_data_ptr", true},
      {(void **)&torch.dim, "aoti_torch_get_dim", true},
      {(void **)&torch.sizes, "aoti_torch_get_sizes", true},
      {(void **)&torch.strides, "aoti_torch_get_strides", true},
      {(void **)&torch.dtype, "aoti_torch_get_dtype", true},
      {(void **)&torch.device_type, "aoti_torch_get_device_type", true},
      {(void **)&torch.device_index, "aoti_torch_get_device_index", true},
      {(void **)&torch.copy, "aoti_torch_copy_", true},
      {(void **)&torch.grad_enabled, "aoti_torch_grad_mode_is_enabled", true},
      {(void **)&torch.set_grad, "aoti_torch_grad_mode_set_enabled", true},
      {(void **)&torch.what, "torch_exception_get_what_without_backtrace", false},
      {(void **)&torch.new_value, "torch_new_stable_ivalue", false},
  };
  for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
    *wanted[i].slot = dlsym(opened, wanted[i].name);
    if (*wanted[i].slot == NULL && wanted[i].needed) {
      dlclose(opened);
      return text("this torch has no %s; torch >= 2.10 is needed", wanted[i].name);
    }
  }
  library = opened;
  return NULL;
}

void *eae_torch_view(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,
                     int32_t device_index) {
  void *made = NULL;
  return torch.view(data, ndim, sizes, strides, 0, dtype, device_type, device_index, &made) == 0 ? made : NULL;
}

void *eae_torch_share(void *tensor) {
  void *made = NULL;
  return torch.share(tensor, &made) == 0 ? made : NULL;
}

void eae_torch_delete(void *tensor) { torch.delete(tensor); }

int eae_torch_describe(void *tensor, eae_torch_facts *facts) {
  return torch.data(tensor, &facts->data) | torch.dim(tensor, &facts->ndim) | torch.sizes(tensor, &facts->sizes) |
         torch.strides(tensor, &facts->strides) | torch.dtype(tensor, &facts->dtype) |
         torch.device_type(tensor, &facts->device_type) | torch.device_index(tensor, &facts->device_index);
}

static char *outcome(status code, const char *op) {
  if (code == 0) {
    return NULL;
  }
  if (torch.what != NULL) {
    const char *said = torch.what();
    if (said != NULL) {
      return text("%s", said);
    }
  }
  return text("torch refused %s (its message is on standard error)", op);
}

char *eae_torch_call(const char *op, const char *overload, uint64_t *stack) {
  bool before = torch.grad_enabled();
  torch.set_grad(false);
  status code = torch.call(op, overload, stack, EAE_TORCH_VERSION);
  torch.set_grad(before);
  return outcome(code, op);
}

char *eae_torch_copy(void *dst, void *src) {
  bool before = torch.grad_enabled();
  torch.set_grad(false);
  status code = torch.copy(dst, src, 1);
  torch.set_grad(before);
  return outcome(code, "copy_");
}

uint64_t eae_torch_some(uint64_t value) {
  uint64_t *box = NULL;
  // Before 2.13 torch frees the box with `delete`, which on Linux is free.
  if (torch.new_value == NULL || torch.new_value(&box) != 0) {
    box = malloc(sizeof(*box));
    if (box == NULL) {
      abort();
    }
  }
  *box = value;
  return (uint64_t)(uintptr_t)box;
}

int32_t eae_torch_code(const char *kind, const char *name) {
  char symbol[64];
  snprintf(symbol, sizeof(symbol), "aoti_torch_%s_%s", kind, name);
  int32_t (*get)(void) = (int32_t (*)(void))dlsym(library, symbol);
  return get != NULL ? get() : -1;
}

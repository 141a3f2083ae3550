#include "dlpack.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"

int32_t eae_forked = 0;

void eae_at_fork_child(void) { eae_forked = 1; }

__attribute__((constructor)) static void eae_register_fork_hook(void) { pthread_atfork(NULL, NULL, eae_at_fork_child); }

// The deleter that consumers of our tensors call: on any thread, with or without Python's lock.
static void eae_dl_release(DLManagedTensor *self) {
  if (eae_forked) {
    return;
  }
  int64_t id = (int64_t)(intptr_t)self->manager_ctx;
  free(self);
  eaeReleaseExported(id);
}

DLManagedTensor *eae_dl_new(void *data, int32_t device_type, int32_t device_id, int32_t ndim, uint8_t code, uint8_t bits,
                            uint16_t lanes, const int64_t *dims, int64_t id) {
  // One block: the structure, then shape and strides.
  size_t dim_bytes = 2 * (size_t)ndim * sizeof(int64_t);
  DLManagedTensor *made = malloc(sizeof(DLManagedTensor) + dim_bytes);
  if (made == NULL) {
    return NULL;
  }
  int64_t *own = (int64_t *)(made + 1);
  if (dim_bytes > 0) {
    memcpy(own, dims, dim_bytes);
  }
  made->dl_tensor.data = data;
  made->dl_tensor.device.device_type = device_type;
  made->dl_tensor.device.device_id = device_id;
  made->dl_tensor.ndim = ndim;
  made->dl_tensor.dtype.code = code;
  made->dl_tensor.dtype.bits = bits;
  made->dl_tensor.dtype.lanes = lanes;
  made->dl_tensor.shape = own;
  made->dl_tensor.strides = own + ndim;
  made->dl_tensor.byte_offset = 0;
  made->manager_ctx = (void *)(intptr_t)id;
  made->deleter = eae_dl_release;
  return made;
}

void eae_dl_delete(DLManagedTensor *tensor) {
  if (!eae_forked && tensor->deleter != NULL) {
    tensor->deleter(tensor);
  }
}

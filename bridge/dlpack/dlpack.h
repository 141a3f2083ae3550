// The DLPack structures (unversioned, as in DLPack 0.8) and the C side of crossing with them.
#ifndef EAE_DLPACK_H
#define EAE_DLPACK_H

#include <stdint.h>

typedef struct {
  int32_t device_type;
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

// 1 in a process that was forked after the library was loaded. Go's runtime does not work there.
extern int32_t eae_forked;

// Sets eae_forked. Called by pthread_atfork; may also be called by the host.
void eae_at_fork_child(void);

// A tensor on memory that Go owns. dims holds the ndim sizes, then the ndim strides; both are copied. When the consumer is
// done, Go's release function of that id is called, once. NULL when there is no memory for the structure.
DLManagedTensor *eae_dl_new(void *data, int32_t device_type, int32_t device_id, int32_t ndim, uint8_t code, uint8_t bits,
                            uint16_t lanes, const int64_t *dims, int64_t id);

// Calls the tensor's own deleter. Does nothing in a forked child: the memory belongs to the parent's threads.
void eae_dl_delete(DLManagedTensor *tensor);

#endif

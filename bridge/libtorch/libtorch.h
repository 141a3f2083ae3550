// LibTorch's stable C ABI (torch >= 2.10), looked up in the libtorch_cpu that is in the process. Plain C, no torch header.
#ifndef EAE_LIBTORCH_H
#define EAE_LIBTORCH_H

#include <stdint.h>

// Opens the library at path (RTLD_NOLOAD: it must be in the process already, unless load is 1) and looks up its functions. Gives NULL, or what
// is wrong as a text that the caller frees. A second call after a success does nothing.
char *eae_torch_open(const char *path, int load);

// A tensor on memory that the caller keeps alive. 0 when torch refuses.
void *eae_torch_view(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,
                     int32_t device_index);

// Another reference to the same tensor; NULL when torch refuses.
void *eae_torch_share(void *tensor);
void eae_torch_delete(void *tensor);

// What a tensor is. sizes and strides are borrowed from it. 0 when all went well.
typedef struct {
  void *data;
  int64_t ndim;
  int64_t *sizes;
  int64_t *strides;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
} eae_torch_facts;
int eae_torch_describe(void *tensor, eae_torch_facts *facts);

// Calls an operator with grad mode off on this thread, restored afterwards. The stack holds the arguments and then the results; tensors on it belong
// to the call. Gives NULL, or torch's error text, which the caller frees.
char *eae_torch_call(const char *op, const char *overload, uint64_t *stack);

// Copies src over dst, without waiting where the device allows it. NULL, or torch's error text.
char *eae_torch_copy(void *dst, void *src);

// Makes an optional argument that holds a value; the call that takes it frees it.
uint64_t eae_torch_some(uint64_t value);

// torch's number for a dtype (by its torch name) or a device type ("cpu", "cuda"); -1 when this torch has none.
int32_t eae_torch_code(const char *kind, const char *name);

#endif

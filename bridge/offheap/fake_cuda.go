package offheap

/*
#include <stdlib.h>

// What a test puts in CUDA's place: page-aligned memory up to 1 MiB, "out of memory" (2) beyond.
static int eae_fake_alloc(void **block, size_t bytes, unsigned flags) {
  (void)flags;
  if (bytes > 1 << 20) {
    return 2;
  }
  return posix_memalign(block, 4096, bytes);
}

static int eae_fake_free(void *block) {
  free(block);
  return 0;
}

static void *eae_fake_alloc_address(void) { return (void *)eae_fake_alloc; }
static void *eae_fake_free_address(void) { return (void *)eae_fake_free; }
*/
import "C"

// FakePinned is Pinned on a stand-in for CUDA, for tests where there is no device: it refuses blocks of more than 1 MiB.
func FakePinned() Pinned {
	return Pinned{alloc: C.eae_fake_alloc_address(), free: C.eae_fake_free_address()}
}

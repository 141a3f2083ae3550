/* Counts what torch's CPU allocator holds, to the byte.
 *
 * torch allocates CPU tensors, and oneDNN its scratch, with posix_memalign and
 * gives them back with free (both undefined in libc10 and libtorch_cpu). This
 * library is preloaded in front of libc and keeps, for every aligned block of
 * at least min_bytes, its requested size. Plain malloc is not counted: Python's
 * own objects are not tensors.
 *
 * It calls glibc's __libc_* entry points and never dlsym, which may allocate
 * before this library is ready. Linux with glibc only.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void __libc_free(void *block);

/* Open addressing, linear probing; the pages of an unused table are never touched. */
#define SLOT_BITS 20
#define SLOTS ((size_t)1 << SLOT_BITS)

struct slot {
    uintptr_t block; /* 0: free */
    size_t bytes;
};

static struct slot table[SLOTS];
static size_t used_slots;
static size_t min_bytes = 1024;
static int64_t live_bytes, peak_bytes, allocations, lost;
static atomic_flag lock = ATOMIC_FLAG_INIT;

static void acquire(void) {
    while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire)) sched_yield();
}

static void release(void) { atomic_flag_clear_explicit(&lock, memory_order_release); }

/* A child forked while another thread held the lock would wait for it for ever. */
__attribute__((constructor)) static void start(void) {
    const char *text = getenv("ALLOC_COUNT_MIN_BYTES");
    if (text != NULL) min_bytes = strtoull(text, NULL, 10);
    if (min_bytes == 0) min_bytes = 1;
    pthread_atfork(NULL, NULL, release);
}

/* Aligned blocks differ above their low bits: spread those (Fibonacci hashing). */
static size_t home(uintptr_t block) {
    return (size_t)(((uint64_t)(block >> 4) * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - SLOT_BITS));
}

static void track(void *block, size_t bytes) {
    acquire();
    if (used_slots >= SLOTS - SLOTS / 8) {
        lost++;
    } else {
        size_t i = home((uintptr_t)block);
        while (table[i].block != 0) i = (i + 1) & (SLOTS - 1);
        table[i].block = (uintptr_t)block;
        table[i].bytes = bytes;
        used_slots++;
        allocations++;
        live_bytes += (int64_t)bytes;
        if (live_bytes > peak_bytes) peak_bytes = live_bytes;
    }
    release();
}

static void untrack(void *block) {
    acquire();
    size_t i = home((uintptr_t)block);
    while (table[i].block != 0 && table[i].block != (uintptr_t)block) i = (i + 1) & (SLOTS - 1);
    if (table[i].block != 0) {
        live_bytes -= (int64_t)table[i].bytes;
        used_slots--;
        /* Close the gap: move back whatever probed past it, so that no lookup ends early. */
        size_t gap = i;
        for (;;) {
            i = (i + 1) & (SLOTS - 1);
            if (table[i].block == 0) break;
            size_t wanted = home(table[i].block);
            if (((i - wanted) & (SLOTS - 1)) >= ((i - gap) & (SLOTS - 1))) {
                table[gap] = table[i];
                gap = i;
            }
        }
        table[gap].block = 0;
    }
    release();
}

/* usable size >= requested size, so a block below the limit is certainly not in the table. */
static int may_be_tracked(void *block) { return block != NULL && malloc_usable_size(block) >= min_bytes; }

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) != 0 || alignment == 0 || (alignment & (alignment - 1)) != 0) return EINVAL;
    int saved = errno;
    void *block = __libc_memalign(alignment, size);
    errno = saved;
    if (block == NULL) return ENOMEM;
    if (size >= min_bytes) track(block, size);
    *out = block;
    return 0;
}

void *aligned_alloc(size_t alignment, size_t size) {
    void *block = __libc_memalign(alignment, size);
    if (block != NULL && size >= min_bytes) track(block, size);
    return block;
}

void free(void *block) {
    if (may_be_tracked(block)) untrack(block);
    __libc_free(block);
}

/* The block that realloc returns is an ordinary one: it is counted no longer. */
void *realloc(void *block, size_t size) {
    int watched = may_be_tracked(block);
    void *moved = __libc_realloc(block, size);
    if (watched && (moved != NULL || size == 0)) untrack(block);
    return moved;
}

int64_t alloc_count_live(void) {
    acquire();
    int64_t bytes = live_bytes;
    release();
    return bytes;
}

/* Returns the high-water mark since the last call and lowers it to what is live now. */
int64_t alloc_count_take_peak(void) {
    acquire();
    int64_t bytes = peak_bytes;
    peak_bytes = live_bytes;
    release();
    return bytes;
}

int64_t alloc_count_allocations(void) {
    acquire();
    int64_t count = allocations;
    release();
    return count;
}

/* Blocks that did not fit the table: the counts are right only while this is 0. */
int64_t alloc_count_lost(void) {
    acquire();
    int64_t count = lost;
    release();
    return count;
}

/* Counts the bytes that a process has asked malloc (and, in blocks above 1 MiB, mmap) for.
 *
 * Loaded with LD_PRELOAD. Requested bytes are counted, not pages: large blocks are looked up in a table by their
 * address, small ones count as what malloc_usable_size says of them. glibc's own mmap calls do not pass through here,
 * so a block is never counted twice; Python's arenas are exactly 1 MiB and are left out.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long long live, peak;

static void count(long long bytes) {
    long long now = atomic_fetch_add(&live, bytes) + bytes;
    long long most = atomic_load(&peak);
    while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {}
}

long long koila_live(void) { return atomic_load(&live); }
long long koila_peak(void) { return atomic_load(&peak); }
void koila_reset_peak(void) { atomic_store(&peak, atomic_load(&live)); }

/* The table of large blocks: open addressing, linear probing, entries moved back on removal. */
enum { LARGE = 4096, MAPPED = 1 << 20, BITS = 20, SLOTS = 1 << BITS };
static struct { uintptr_t address; size_t bytes; } table[SLOTS];
static size_t entries;
static atomic_flag held = ATOMIC_FLAG_INIT;

static void lock(void) { while (atomic_flag_test_and_set_explicit(&held, memory_order_acquire)) {} }
static void unlock(void) { atomic_flag_clear_explicit(&held, memory_order_release); }
static size_t home(uintptr_t address) { return (size_t)((address * 0x9E3779B97F4A7C15ull) >> (64 - BITS)); }

static int insert(void *block, size_t bytes) {
    lock();
    int fits = entries < SLOTS / 2;
    if (fits) {
        size_t slot = home((uintptr_t)block);
        while (table[slot].address) slot = (slot + 1) % SLOTS;
        table[slot].address = (uintptr_t)block;
        table[slot].bytes = bytes;
        entries++;
    }
    unlock();
    return fits;
}

static int take(void *block, size_t *bytes) {
    lock();
    size_t slot = home((uintptr_t)block);
    while (table[slot].address && table[slot].address != (uintptr_t)block) slot = (slot + 1) % SLOTS;
    int found = table[slot].address != 0;
    if (found) {
        *bytes = table[slot].bytes;
        entries--;
        size_t hole = slot;
        for (size_t next = (hole + 1) % SLOTS; table[next].address; next = (next + 1) % SLOTS) {
            size_t distance = (next - home(table[next].address)) % SLOTS;
            if (distance >= (next - hole) % SLOTS) {
                table[hole] = table[next];
                hole = next;
            }
        }
        table[hole].address = 0;
    }
    unlock();
    return found;
}

static void *born(void *block, size_t bytes) {
    if (block) count(bytes >= LARGE && insert(block, bytes) ? bytes : malloc_usable_size(block));
    return block;
}

static void dies(void *block) {
    size_t bytes = malloc_usable_size(block);
    if (bytes >= LARGE) take(block, &bytes);
    count(-(long long)bytes);
}

void *malloc(size_t bytes) { return born(__libc_malloc(bytes), bytes); }

void *calloc(size_t number, size_t size) {
    return born(__libc_calloc(number, size), number * size);  /* an overflow has failed in __libc_calloc */
}

void free(void *block) {
    if (!block) return;
    int error = errno;
    dies(block);
    __libc_free(block);
    errno = error;
}

void *realloc(void *block, size_t bytes) {
    if (!block) return malloc(bytes);
    if (!bytes) {
        free(block);
        return NULL;
    }
    size_t before = malloc_usable_size(block);
    if (before >= LARGE) take(block, &before);
    void *moved = __libc_realloc(block, bytes);
    if (!moved) {
        if (before >= LARGE) insert(block, before);
        return NULL;
    }
    /* While it moves, both copies may exist; glibc grows in place or remaps where it can. */
    count(-(long long)before);
    return born(moved, bytes);
}

void *memalign(size_t alignment, size_t bytes) { return born(__libc_memalign(alignment, bytes), bytes); }
void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
void *valloc(size_t bytes) { return memalign((size_t)getpagesize(), bytes); }

int posix_memalign(void **result, size_t alignment, size_t bytes) {
    if (alignment % sizeof(void *) || !alignment || (alignment & (alignment - 1))) return EINVAL;
    int error = errno;
    void *block = memalign(alignment, bytes);
    errno = error;
    if (!block) return ENOMEM;
    *result = block;
    return 0;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    void *block = (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
    /* Thread stacks and reservations without access are address space, not memory. */
    int counted = block != MAP_FAILED && bytes > MAPPED && (flags & MAP_ANONYMOUS) && (protection & PROT_WRITE) &&
                  !(flags & (MAP_STACK | MAP_NORESERVE));
    if (counted && insert(block, bytes)) count((long long)bytes);
    return block;
}

void *mmap64(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    return mmap(address, bytes, protection, flags, file, offset);
}

int munmap(void *address, size_t bytes) {
    size_t known;
    int error = (int)syscall(SYS_munmap, address, bytes);
    if (!error && bytes > MAPPED && take(address, &known)) count(-(long long)known);
    return error;
}

/* Direct reads by threads against io_uring, alternately: an experiment, see docs/EXPERIMENTS.md.
 *
 *     cc -O2 -o /tmp/io_uring benchmarks/io_uring.c -luring -lpthread && /tmp/io_uring MODEL/experts-*.safetensors
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <liburing.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define RECORD (3264L << 10) /* an expert of OLMoE-7B in int4-g64 */
#define STRIDE (4L << 20)
#define READS 64
#define BUFFERS 16
#define ROUNDS 7

static int fds[64], file_of[READS], taken;
static long offset_of[READS];
static char *memory;

static double clock_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double cpu_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static void must(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static void *read_some(void *unused) {
    for (int i; (i = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < READS;)
        must(pread(fds[file_of[i]], memory + i % BUFFERS * STRIDE, RECORD, offset_of[i]) == RECORD, "pread");
    return unused;
}

static void by_threads(int depth) {
    pthread_t threads[BUFFERS];
    taken = 0;
    for (int i = 0; i < depth; i++)
        pthread_create(&threads[i], NULL, read_some, NULL);
    for (int i = 0; i < depth; i++)
        pthread_join(threads[i], NULL);
}

static void by_ring(int depth) {
    struct io_uring ring;
    must(!io_uring_queue_init(64, &ring, 0), "io_uring_queue_init");
    for (int asked = 0, done = 0; done < READS;) {
        for (; asked < READS && asked - done < depth; asked++)
            io_uring_prep_read(io_uring_get_sqe(&ring), fds[file_of[asked]], memory + asked % BUFFERS * STRIDE, RECORD,
                               (unsigned long long)offset_of[asked]);
        io_uring_submit_and_wait(&ring, 1);
        for (struct io_uring_cqe *end; !io_uring_peek_cqe(&ring, &end); done++) {
            must(end->res == RECORD, "read");
            io_uring_cqe_seen(&ring, end);
        }
    }
    io_uring_queue_exit(&ring);
}

static void measure(const char *name, void (*read_all)(int), int depth, int num_files) {
    for (int i = 0; i < READS; i++) {
        file_of[i] = rand() % num_files;
        long room = (lseek(fds[file_of[i]], 0, SEEK_END) - RECORD) / 4096;
        offset_of[i] = rand() % room * 4096;
    }
    double cpu = cpu_s(), start = clock_s();
    read_all(depth);
    double seconds = clock_s() - start, gigabytes = READS * RECORD / 1e9;
    printf("%s %d: %.2f GB/s, %.4f s of CPU a GB\n", name, depth, gigabytes / seconds, (cpu_s() - cpu) / gigabytes);
}

int main(int argc, char **argv) {
    int num_files = argc - 1 < 64 ? argc - 1 : 64;
    for (int i = 0; i < num_files; i++)
        must((fds[i] = open(argv[i + 1], O_RDONLY | O_DIRECT)) >= 0, argv[i + 1]);
    size_t size = BUFFERS * STRIDE;
    memory = mmap(NULL, size + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory += -(unsigned long)memory % (2 << 20);
    madvise(memory, size, MADV_HUGEPAGE);
    memset(memory, 1, size);
    for (int round = 0; num_files && round < ROUNDS; round++)
        for (int depth = 2; depth <= 8; depth *= 2) {
            measure("threads ", by_threads, depth, num_files);
            measure("io_uring", by_ring, depth, num_files);
        }
    return !num_files;
}

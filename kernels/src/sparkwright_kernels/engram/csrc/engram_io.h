/* Copyright (c) Sparkwright contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * libsparkwright_engram_io: rows of an Engram file into a caller's buffer, and chunks of rows for packing.
 * A plain C interface, for ctypes and for CUDA's host functions. Linux; no call throws.
 */
#ifndef SPARKWRIGHT_ENGRAM_IO_H
#define SPARKWRIGHT_ENGRAM_IO_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ENGRAM_IO_VERSION 1
#define ENGRAM_API __attribute__((visibility("default")))

enum { ENGRAM_AUTO = 0, ENGRAM_IO_URING = 1, ENGRAM_THREADS = 2 };

typedef struct engram_reader engram_reader;

typedef struct {
  uint64_t payload;       /* byte at which the first row begins */
  uint64_t file_bytes;    /* size that the file must have */
  int64_t lo, hi;         /* ids that it holds: lo <= id < hi */
  uint32_t row_bytes;
  uint32_t rows_per_page; /* rows in each 4096 bytes, or 0: rows lie end to end */
  uint32_t queue_depth;   /* reads in flight of one batch (io_uring) */
  uint32_t threads;       /* size of the pool, for all batches together (threads) */
  uint32_t backend;       /* ENGRAM_AUTO: io_uring where it is built in and allowed, else threads */
  uint32_t cache_rows;    /* rows that are kept in memory, 0 for none */
} engram_options;

typedef struct {
  uint64_t batches, rows, unique_rows; /* unique_rows: valid ids of a batch, each counted once */
  uint64_t absent, out_of_range;       /* ids of -1; ids that are neither -1 nor of this file: zeros for both */
  uint64_t reads, read_bytes;
  uint64_t cache_hits, cache_misses; /* of unique rows */
  uint64_t errors;                   /* batches that failed */
} engram_stats;

/* One batch: row ids[i] to out + i * stride. After engram_run, status is 0, or an errno (ENODATA: the file ends before
 * a row) with the place; then every byte of every row of the batch is 0xff, which as fp8 is NaN. */
typedef struct {
  engram_reader *reader;
  const void *ids;
  uint64_t count;
  uint8_t *out;
  uint64_t stride;
  uint32_t id_bytes; /* 4 or 8: signed integers */
  int32_t status;
  uint64_t error_offset, error_got, error_needed;
} engram_job;

/* 0 and a reader, or an errno; EFBIG: the size differs from file_bytes. `direct` tells whether O_DIRECT is in use,
 * `backend` which one, and `denied` the errno with which io_uring was refused (ENOSYS where it is not built in). */
ENGRAM_API int engram_open(const char *path, const engram_options *options, engram_reader **reader, uint32_t *direct,
                uint32_t *backend, int32_t *denied);
ENGRAM_API void engram_close(engram_reader *reader); /* no batch may be running */
ENGRAM_API void engram_run(void *job);               /* an engram_job; any number of threads at once, also as cudaHostFn_t */
ENGRAM_API void engram_get_stats(engram_reader *reader, engram_stats *stats);

/* Rows from two planes to the rows of a file (zeros between pages' last rows and their ends); returns the XXH64 of it. */
ENGRAM_API uint64_t engram_pack(const uint8_t *weights, const uint8_t *scales, uint8_t *out, uint64_t rows, uint32_t weight_bytes,
                     uint32_t scale_bytes, uint32_t rows_per_page);
ENGRAM_API uint64_t engram_xxh64(const uint8_t *data, uint64_t bytes);
ENGRAM_API uint32_t engram_io_version(void);
ENGRAM_API uint32_t engram_has_io_uring(void);

#ifdef __cplusplus
}
#endif
#endif

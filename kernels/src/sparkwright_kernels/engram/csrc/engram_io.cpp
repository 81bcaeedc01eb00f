// Copyright (c) Sparkwright contributors
// SPDX-License-Identifier: Apache-2.0
#include "engram_io.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#ifdef SPARKWRIGHT_LIBURING
#include <liburing.h>
#endif

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kMaxRead = 16 * kPage;  // neighbouring blocks are read together up to this

// ---------------------------------------------------------------------------------------------------------- XXH64

constexpr uint64_t P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9, P4 = 0x85EBCA77C2B2AE63,
                   P5 = 0x27D4EB2F165667C5;

inline uint64_t rotl(uint64_t x, int r) { return x << r | x >> (64 - r); }
inline uint64_t load64(const uint8_t *p) {
  uint64_t x;
  memcpy(&x, p, 8);
  return x;
}
inline uint64_t load32(const uint8_t *p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}
inline uint64_t mix(uint64_t lane, uint64_t x) { return rotl(lane + x * P2, 31) * P1; }

/// XXH64 with seed 0 of a stream; every piece but the last is a multiple of 32 bytes.
class Xxh64 {
 public:
  void update(const uint8_t *p, uint64_t bytes) {
    total_ += bytes;
    uint64_t a = lane_[0], b = lane_[1], c = lane_[2], d = lane_[3];
    for (; bytes >= 32; p += 32, bytes -= 32) {
      a = mix(a, load64(p));
      b = mix(b, load64(p + 8));
      c = mix(c, load64(p + 16));
      d = mix(d, load64(p + 24));
    }
    lane_[0] = a, lane_[1] = b, lane_[2] = c, lane_[3] = d;
    memcpy(tail_, p, tail_bytes_ = bytes);
  }

  uint64_t digest() const {
    uint64_t h = P5;
    if (total_ >= 32) {
      h = rotl(lane_[0], 1) + rotl(lane_[1], 7) + rotl(lane_[2], 12) + rotl(lane_[3], 18);
      for (uint64_t lane : lane_) h = (h ^ mix(0, lane)) * P1 + P4;
    }
    h += total_;
    const uint8_t *p = tail_, *end = tail_ + tail_bytes_;
    for (; p + 8 <= end; p += 8) h = rotl(h ^ mix(0, load64(p)), 27) * P1 + P4;
    for (; p + 4 <= end; p += 4) h = rotl(h ^ load32(p) * P1, 23) * P2 + P3;
    for (; p < end; ++p) h = rotl(h ^ *p * P5, 11) * P1;
    h = (h ^ h >> 33) * P2;
    h = (h ^ h >> 29) * P3;
    return h ^ h >> 32;
  }

 private:
  uint64_t lane_[4] = {P1 + P2, P2, 0, 0 - P1};
  uint64_t total_ = 0, tail_bytes_ = 0;
  uint8_t tail_[32];
};

// -------------------------------------------------------------------------------------------------------- packing

template <typename Weight, typename Scale>
uint64_t pack(const uint8_t *weights, const uint8_t *scales, uint8_t *out, uint64_t rows, Weight weight_bytes,
              Scale scale_bytes, uint32_t rows_per_page) {
  const uint64_t row_bytes = weight_bytes + scale_bytes;
  // Rows whose bytes are whole stripes of the hash and still in the cache when it reads them.
  const uint64_t group = rows_per_page ? rows_per_page * 8 : 128;
  Xxh64 hash;
  for (uint64_t done = 0; done < rows; done += group) {
    const uint64_t now = std::min(group, rows - done);
    uint8_t *const begin = out;
    for (uint64_t row = 0; row < now; ++row) {
      memcpy(out, weights, weight_bytes);
      memcpy(out + weight_bytes, scales, scale_bytes);
      weights += weight_bytes, scales += scale_bytes, out += row_bytes;
      if (rows_per_page && ((row + 1) % rows_per_page == 0 || row + 1 == now)) {
        const uint64_t used = (out - begin) % kPage;
        if (used) memset(out, 0, kPage - used), out += kPage - used;
      }
    }
    hash.update(begin, out - begin);
  }
  return hash.digest();
}

// -------------------------------------------------------------------------------------------------------- reading

struct Item {
  int64_t row;  // from the file's first row on
  uint64_t slot;
};

struct Read {
  uint64_t offset, bytes, needed;  // needed: up to the end of its last row
  size_t first, last;              // items that it serves
};

struct Failure {
  int status = 0;
  uint64_t offset = 0, got = 0, needed = 0;
};

/// Memory for direct I/O.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    at_ = static_cast<uint8_t *>(at);
  }
  ~Buffer() { munmap(at_, bytes_); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  uint8_t *at(size_t offset = 0) const { return at_ + offset; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  uint8_t *at_;
};

/// Complete a read of which `got` bytes are there, or of which nothing is if negative (an errno).
Failure finish(int fd, uint8_t *buffer, const Read &read, int64_t got) {
  while (true) {
    if (got < 0 && got != -EINTR && got != -EAGAIN) return {int(-got), read.offset, 0, read.needed};
    if (got >= int64_t(read.needed)) return {};
    // Direct reads go on at a block's beginning.
    const uint64_t from = got > 0 ? uint64_t(got) / kPage * kPage : 0;
    const ssize_t more = pread(fd, buffer + from, read.bytes - from, off_t(read.offset + from));
    if (more < 0) {
      got = -errno;
    } else if (int64_t(from) + more <= std::max<int64_t>(got, 0)) {
      return {ENODATA, read.offset, from + uint64_t(more), read.needed};
    } else {
      got = int64_t(from) + more;
    }
  }
}

struct Batch {
  const engram_job &job;
  uint32_t row_bytes;
  std::vector<Item> items{};  // valid ids that are not cached, by row
  std::vector<Read> reads{};
  Failure failure{};
  size_t next = 0, done = 0;  // of the pool, under its lock

  void deliver(const engram_options &options, const Read &read, const uint8_t *buffer) const {
    for (size_t i = read.first; i < read.last; ++i) {
      const uint64_t row = uint64_t(items[i].row);
      const uint64_t at = options.rows_per_page
                              ? row / options.rows_per_page * kPage + row % options.rows_per_page * row_bytes
                              : row * row_bytes;
      memcpy(job.out + items[i].slot * job.stride, buffer + (options.payload + at - read.offset), row_bytes);
    }
  }
};

/// Rows in memory, eight to a set; the oldest of a set makes room. Not locked.
class Cache {
 public:
  Cache(uint32_t rows, uint32_t row_bytes)
      : sets_(std::max<uint32_t>(1, rows / kWays)), row_bytes_(row_bytes), keys_(sets_ * kWays, -1), hands_(sets_),
        data_(sets_ * kWays * uint64_t(row_bytes)) {}

  const uint8_t *find(int64_t row) const {
    const uint64_t first = set(row) * kWays;
    for (uint64_t i = first; i < first + kWays; ++i)
      if (keys_[i] == row) return &data_[i * row_bytes_];
    return nullptr;
  }

  void insert(int64_t row, const uint8_t *data) {
    if (find(row)) return;
    const uint64_t s = set(row), i = s * kWays + hands_[s]++ % kWays;
    keys_[i] = row;
    memcpy(&data_[i * row_bytes_], data, row_bytes_);
  }

 private:
  static constexpr uint64_t kWays = 8;
  uint64_t set(int64_t row) const { return (uint64_t(row) * P1 >> 32) % sets_; }
  uint64_t sets_;
  uint32_t row_bytes_;
  std::vector<int64_t> keys_;
  std::vector<uint8_t> hands_;
  std::vector<uint8_t> data_;
};

#ifdef SPARKWRIGHT_LIBURING
/// A ring with its buffers; one batch at a time.
class Ring {
 public:
  explicit Ring(uint32_t depth) : depth_(depth), buffer_(depth * kMaxRead), reads_(depth) {}
  ~Ring() {
    if (!ready_) return;
    io_uring_unregister_files(&ring_);  // at once: a ring's end lets go of them later, and a disk stays busy
    io_uring_queue_exit(&ring_);
  }

  /// 0, or the errno with which the kernel refuses a ring.
  int start(int fd) {
    int rc = io_uring_queue_init(depth_, &ring_, IORING_SETUP_COOP_TASKRUN);
    if (rc == -EINVAL) rc = io_uring_queue_init(depth_, &ring_, 0);  // before Linux 5.19
    if (rc < 0) return -rc;
    ready_ = true;
    if ((rc = io_uring_register_files(&ring_, &fd, 1)) < 0) return -rc;
    const iovec all{buffer_.at(), buffer_.bytes()};
    fixed_ = io_uring_register_buffers(&ring_, &all, 1) == 0;  // counts as locked memory: not everybody may
    return 0;
  }

  void run(int fd, const engram_options &options, Batch &batch) {
    std::vector<uint32_t> free(depth_);
    for (uint32_t i = 0; i < depth_; ++i) free[i] = depth_ - 1 - i;
    size_t next = 0;
    while (true) {
      while (!free.empty() && next < batch.reads.size() && !batch.failure.status) {
        const uint32_t slot = free.back();
        const Read &read = batch.reads[next];
        io_uring_sqe *sqe = io_uring_get_sqe(&ring_);
        if (!sqe) break;
        if (fixed_)
          io_uring_prep_read_fixed(sqe, 0, buffer_.at(slot * kMaxRead), unsigned(read.bytes), read.offset, 0);
        else
          io_uring_prep_read(sqe, 0, buffer_.at(slot * kMaxRead), unsigned(read.bytes), read.offset);
        sqe->flags |= IOSQE_FIXED_FILE;
        sqe->user_data = slot;
        reads_[slot] = next++;
        free.pop_back();
      }
      if (free.size() == depth_) return;  // nothing in flight, and nothing left to begin
      const int rc = io_uring_submit_and_wait(&ring_, 1);
      if (rc < 0 && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) {
        // What is in flight still writes to the buffers: only the ring's end stops it.
        batch.failure = {-rc, 0, 0, 0};
        io_uring_queue_exit(&ring_);
        ready_ = false;
        return;
      }
      unsigned head, seen = 0;
      io_uring_cqe *cqe;
      io_uring_for_each_cqe(&ring_, head, cqe) {
        ++seen;
        const uint32_t slot = uint32_t(cqe->user_data);
        const Read &read = batch.reads[reads_[slot]];
        uint8_t *buffer = buffer_.at(slot * kMaxRead);
        const Failure failure = finish(fd, buffer, read, cqe->res);
        if (failure.status)
          batch.failure = failure;
        else
          batch.deliver(options, read, buffer);
        free.push_back(slot);
      }
      io_uring_cq_advance(&ring_, seen);
    }
  }

  bool ready() const { return ready_; }

 private:
  uint32_t depth_;
  Buffer buffer_;
  std::vector<size_t> reads_;
  io_uring ring_;
  bool ready_ = false, fixed_ = false;
};
#endif

/// Threads that read one block after another, for all batches of a reader.
class Pool {
 public:
  Pool(int fd, const engram_options &options) : fd_(fd), options_(options), buffers_(options.threads * kMaxRead) {
    try {
      for (uint32_t i = 0; i < options.threads; ++i)
        threads_.emplace_back([this, i] { work(buffers_.at(i * kMaxRead)); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pool() { stop(); }

  void run(Batch &batch) {
    if (batch.reads.empty()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    queue_.push_back(&batch);
    wake_.notify_all();
    finished_.wait(lock, [&] { return batch.done == batch.reads.size(); });
  }

 private:
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread &thread : threads_) thread.join();
  }

  void work(uint8_t *buffer) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      Batch &batch = *queue_.front();
      const Read &read = batch.reads[batch.next++];
      if (batch.next == batch.reads.size()) queue_.pop_front();
      if (!batch.failure.status) {
        lock.unlock();
        const Failure failure = finish(fd_, buffer, read, -EAGAIN);
        if (!failure.status) batch.deliver(options_, read, buffer);
        lock.lock();
        if (failure.status) batch.failure = failure;
      }
      if (++batch.done == batch.reads.size()) finished_.notify_all();
    }
  }

  int fd_;
  const engram_options &options_;
  Buffer buffers_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::deque<Batch *> queue_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

struct engram_reader {
  int fd = -1;
  engram_options options{};
  std::mutex mutex;  // of all that follows
  engram_stats stats{};
  std::unique_ptr<Cache> cache;
#ifdef SPARKWRIGHT_LIBURING
  std::vector<std::unique_ptr<Ring>> rings;  // that no batch is using
#endif
  std::unique_ptr<Pool> pool;

  ~engram_reader() {
    pool.reset();
#ifdef SPARKWRIGHT_LIBURING
    rings.clear();
#endif
    if (fd >= 0) close(fd);
  }

  template <typename Id>
  void sort_out(Batch &batch, engram_stats &count) {
    const engram_job &job = batch.job;
    batch.items.reserve(job.count);
    for (uint64_t i = 0; i < job.count; ++i) {
      const int64_t id = static_cast<const Id *>(job.ids)[i];
      if (id >= options.lo && id < options.hi) {
        batch.items.push_back({id - options.lo, i});
        continue;
      }
      ++(id == -1 ? count.absent : count.out_of_range);
      memset(job.out + i * job.stride, 0, options.row_bytes);
    }
    count.rows = job.count;
    std::sort(batch.items.begin(), batch.items.end(), [](const Item &a, const Item &b) { return a.row < b.row; });
    if (cache) serve_from_cache(batch, count);
    int64_t before = -1;
    for (size_t i = 0; i < batch.items.size(); ++i) {
      const int64_t row = batch.items[i].row;
      count.unique_rows += row != before;
      before = row;
      const uint64_t per_page = options.rows_per_page, bytes = options.row_bytes;
      const uint64_t begin =
          options.payload + (per_page ? row / per_page * kPage + row % per_page * bytes : row * bytes);
      const uint64_t first = begin / kPage * kPage, end = begin + bytes;
      const uint64_t last = (end + kPage - 1) / kPage * kPage;
      Read *read = batch.reads.empty() ? nullptr : &batch.reads.back();
      if (!read || first > read->offset + read->bytes || last - read->offset > kMaxRead) {
        batch.reads.push_back({first, last - first, end - first, i, i + 1});
        continue;
      }
      read->bytes = std::max(read->bytes, last - read->offset);
      read->needed = end - read->offset;
      read->last = i + 1;
    }
    count.reads = batch.reads.size();
    for (const Read &read : batch.reads) count.read_bytes += read.bytes;
  }

  void serve_from_cache(Batch &batch, engram_stats &count) {
    std::lock_guard<std::mutex> lock(mutex);
    auto kept = batch.items.begin();
    int64_t before = -1;
    for (const Item &item : batch.items) {
      const uint8_t *data = cache->find(item.row);
      if (item.row != before) {
        ++(data ? count.cache_hits : count.cache_misses);
        count.unique_rows += data != nullptr;  // the others are counted where they are read
      }
      before = item.row;
      if (data)
        memcpy(batch.job.out + item.slot * batch.job.stride, data, options.row_bytes);
      else
        *kept++ = item;
    }
    batch.items.erase(kept, batch.items.end());
  }

  void fetch(Batch &batch) {
#ifdef SPARKWRIGHT_LIBURING
    if (!pool) {
      if (batch.reads.empty()) return;
      std::unique_ptr<Ring> ring;
      {
        std::lock_guard<std::mutex> lock(mutex);
        if (!rings.empty()) ring = std::move(rings.back()), rings.pop_back();
      }
      if (!ring) {
        ring = std::make_unique<Ring>(options.queue_depth);
        if (const int status = ring->start(fd)) {
          batch.failure = {status, 0, 0, 0};
          return;
        }
      }
      ring->run(fd, options, batch);
      std::lock_guard<std::mutex> lock(mutex);
      if (ring->ready()) rings.push_back(std::move(ring));
      return;
    }
#endif
    pool->run(batch);
  }

  void run(engram_job &job) {
    engram_stats count{};
    Batch batch{job, options.row_bytes};
    try {
      if (job.id_bytes == 4)
        sort_out<int32_t>(batch, count);
      else
        sort_out<int64_t>(batch, count);
      fetch(batch);
    } catch (const std::bad_alloc &) {
      batch.failure = {ENOMEM, 0, 0, 0};
    } catch (...) {
      batch.failure = {EAGAIN, 0, 0, 0};
    }
    const Failure &failure = batch.failure;
    job.status = failure.status;
    job.error_offset = failure.offset, job.error_got = failure.got, job.error_needed = failure.needed;
    if (failure.status)
      for (uint64_t i = 0; i < job.count; ++i) memset(job.out + i * job.stride, 0xff, options.row_bytes);

    std::lock_guard<std::mutex> lock(mutex);
    if (cache && !failure.status)
      for (const Item &item : batch.items) cache->insert(item.row, job.out + item.slot * job.stride);
    stats.batches += 1, stats.errors += failure.status != 0;
    stats.rows += count.rows, stats.unique_rows += count.unique_rows;
    stats.absent += count.absent, stats.out_of_range += count.out_of_range;
    stats.reads += count.reads, stats.read_bytes += count.read_bytes;
    stats.cache_hits += count.cache_hits, stats.cache_misses += count.cache_misses;
  }
};

extern "C" {

int engram_open(const char *path, const engram_options *options, engram_reader **out, uint32_t *direct,
                uint32_t *backend, int32_t *denied) try {
  *out = nullptr, *denied = 0;
  if (!options->row_bytes || options->row_bytes > kPage || options->rows_per_page > kPage / options->row_bytes ||
      !options->queue_depth || options->queue_depth > 4096 || !options->threads || options->threads > 1024 ||
      options->payload % kPage || options->backend > ENGRAM_THREADS)
    return EINVAL;
  auto reader = std::make_unique<engram_reader>();
  reader->options = *options;
  *direct = 1;
  reader->fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (reader->fd < 0 && errno == EINVAL) {  // a filesystem without direct I/O
    *direct = 0;
    reader->fd = open(path, O_RDONLY | O_CLOEXEC);
  }
  struct stat found;
  if (reader->fd < 0 || fstat(reader->fd, &found) < 0) return errno;
  if (uint64_t(found.st_size) != options->file_bytes) return EFBIG;
  if (options->cache_rows) reader->cache = std::make_unique<Cache>(options->cache_rows, options->row_bytes);
  *backend = ENGRAM_THREADS;
#ifdef SPARKWRIGHT_LIBURING
  if (options->backend != ENGRAM_THREADS) {
    auto ring = std::make_unique<Ring>(options->queue_depth);
    *denied = ring->start(reader->fd);
    if (!*denied) {
      *backend = ENGRAM_IO_URING;
      reader->rings.push_back(std::move(ring));
    }
  }
#else
  if (options->backend != ENGRAM_THREADS) *denied = ENOSYS;
#endif
  if (*denied && options->backend == ENGRAM_IO_URING) return *denied;
  if (*backend == ENGRAM_THREADS) reader->pool = std::make_unique<Pool>(reader->fd, reader->options);
  *out = reader.release();
  return 0;
} catch (const std::bad_alloc &) {
  return ENOMEM;
} catch (...) {  // no more threads
  return EAGAIN;
}

void engram_close(engram_reader *reader) { delete reader; }

void engram_run(void *job) {
  auto *given = static_cast<engram_job *>(job);
  given->reader->run(*given);
}

void engram_get_stats(engram_reader *reader, engram_stats *stats) {
  std::lock_guard<std::mutex> lock(reader->mutex);
  *stats = reader->stats;
}

uint64_t engram_pack(const uint8_t *weights, const uint8_t *scales, uint8_t *out, uint64_t rows, uint32_t weight_bytes,
                     uint32_t scale_bytes, uint32_t rows_per_page) {
  if (weight_bytes == 256 && scale_bytes == 8)  // known sizes copy in a few instructions
    return pack(weights, scales, out, rows, std::integral_constant<uint32_t, 256>(),
                std::integral_constant<uint32_t, 8>(), rows_per_page);
  return pack(weights, scales, out, rows, weight_bytes, scale_bytes, rows_per_page);
}

uint64_t engram_xxh64(const uint8_t *data, uint64_t bytes) {
  Xxh64 hash;
  hash.update(data, bytes);
  return hash.digest();
}

uint32_t engram_io_version(void) { return ENGRAM_IO_VERSION; }

uint32_t engram_has_io_uring(void) {
#ifdef SPARKWRIGHT_LIBURING
  return 1;
#else
  return 0;
#endif
}
}

// Streams: work in order on each, in no order between them unless one waits for another.
//
// Kernels are done when they are asked for. Copies between host and device that do not block are late: they are done
// when their stream goes on, when another stream that waited for them goes on, or when the host waits. Who looks at
// their target before sees 0x7f bytes, and they read their source as late as that. Each block of memory knows the
// stream that wrote to it last: a read that no event puts behind that write is a race, and a copy that reads so gives
// 0x7f bytes. Memory that is freed while a late copy uses it is overwritten, unless the copy's stream was recorded.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace sim {

constexpr int kPoison = 0x7f;
using StreamKey = std::pair<int, c10::StreamId>;  // Device and stream.
using Clock = std::map<StreamKey, uint64_t>;      // How far each stream is known to be done.

struct Late {
  std::function<void()> run;  // A copy, or nothing.
  Clock after;                // What must be done before.
  std::vector<void*> blocks;  // Memory of the device that it uses.
  uint64_t place;             // Its place in its stream.
};
struct Stream {
  std::deque<Late> late;
  uint64_t issued = 0;
  Clock seen;  // What this stream has waited for.
};
struct Write {
  StreamKey stream;
  uint64_t place;
};

bool asynchronous = false;
std::recursive_mutex queue_mutex;
std::map<StreamKey, Stream> streams;
std::map<void*, Write> writes;                   // The last write to each block.
std::map<void*, StreamKey> homes;                // The stream on which a block was allocated, and is used again.
std::map<void*, std::set<StreamKey>> recorded;   // Streams that a block was recorded on.
std::map<void*, std::function<void()>> leaving;  // Blocks that are freed when nobody uses them any more.
std::atomic<int64_t> num_races{0}, num_late{0};
using Locked = std::lock_guard<std::recursive_mutex>;

thread_local std::map<int, c10::StreamId> current_stream;
StreamKey here(int device) { return {device, current_stream[device]}; }

bool uses(const Late& late, void* block) {
  return std::find(late.blocks.begin(), late.blocks.end(), block) != late.blocks.end();
}
bool is_used(void* block) {
  for (auto& [key, stream] : streams)
    for (auto& late : stream.late)
      if (uses(late, block)) return true;
  return false;
}
void let_go() {
  for (auto it = leaving.begin(); it != leaving.end();) {
    if (is_used(it->first)) {
      ++it;
      continue;
    }
    auto free = std::move(it->second);
    it = leaving.erase(it);
    free();
  }
}

/// Do what is late on a stream, up to a place in it.
void drain(StreamKey key, uint64_t up_to) {
  Locked l(queue_mutex);
  auto& own = streams[key];
  while (!own.late.empty() && own.late.front().place <= up_to) {
    Late due = std::move(own.late.front());
    own.late.pop_front();
    for (auto& [other, place] : due.after) drain(other, place);
    if (due.run) due.run();
  }
  let_go();
}
void drain(StreamKey key) { drain(key, UINT64_MAX); }
void drain_all() {
  Locked l(queue_mutex);
  std::vector<StreamKey> keys;
  for (auto& [key, stream] : streams) keys.push_back(key);
  for (auto& key : keys) drain(key);
}

/// Whether what a stream does now comes after the last write to a block.
bool is_ordered(StreamKey key, void* block) {
  if (!asynchronous || block == nullptr) return true;
  Locked l(queue_mutex);
  auto it = writes.find(block);
  if (it == writes.end() || it->second.stream == key) return true;
  if (streams[key].seen[it->second.stream] >= it->second.place) return true;
  ++num_races;
  return false;
}
void note_write(StreamKey key, void* block) {
  if (!asynchronous || block == nullptr) return;
  Locked l(queue_mutex);
  writes[block] = {key, ++streams[key].issued};
}
void enqueue(StreamKey key, std::function<void()> run, std::vector<void*> blocks) {
  Locked l(queue_mutex);
  ++num_late;
  auto& own = streams[key];
  own.late.push_back({std::move(run), {}, std::move(blocks), ++own.issued});
}

/// What a stream has done, and has waited for, at this moment.
Clock clock_of(StreamKey key) {
  Locked l(queue_mutex);
  auto& own = streams[key];
  Clock found = own.seen;
  found[key] = own.issued;
  return found;
}
/// What comes on a stream from now on comes after this.
void put_behind(StreamKey key, const Clock& clock) {
  Locked l(queue_mutex);
  auto& own = streams[key];
  for (auto& [other, place] : clock) own.seen[other] = std::max(own.seen[other], place);
  own.late.push_back({nullptr, clock, {}, ++own.issued});
}
void wait_for(const Clock& clock) {
  for (auto& [key, place] : clock) drain(key, place);
}

void note_home(void* block, StreamKey key) {
  if (!asynchronous || block == nullptr) return;
  Locked l(queue_mutex);
  homes[block] = key;
}
void record_use(void* block, StreamKey key) {
  Locked l(queue_mutex);
  recorded[block].insert(key);
}
/// Before a block is freed. True if that must wait; `free` is then called later. Who gets the block next uses it on the
/// stream on which it was allocated, behind what is late there. A block that was not recorded on the stream of another
/// late copy is lost: what is there is overwritten.
bool keep_for_late(void* block, size_t num_bytes, int device, const std::function<void()>& free) {
  if (!asynchronous) return false;
  Locked l(queue_mutex);
  writes.erase(block);
  if (!is_used(block)) {
    homes.erase(block);
    recorded.erase(block);
    return false;
  }
  drain(homes.count(block) ? homes[block] : StreamKey{device, 0});
  homes.erase(block);
  auto known = recorded.find(block);
  const auto on = known == recorded.end() ? std::set<StreamKey>{} : known->second;
  if (known != recorded.end()) recorded.erase(known);
  bool is_late = false, is_safe = true;
  for (auto& [key, stream] : streams)
    for (auto& late : stream.late)
      if (uses(late, block)) {
        is_late = true;
        is_safe = is_safe && on.count(key);
      }
  if (!is_late) return false;
  if (!is_safe) std::memset(block, kPoison, num_bytes);
  leaving[block] = free;
  return true;
}

}  // namespace sim

// Which of the process's descriptors are device files, and whose events others carry.
#pragma once

#include <memory>
#include <string_view>

#include "uverbs/cm.hpp"
#include "uverbs/context.hpp"
#include "uverbs/inside.hpp"

namespace belfry::uverbs {

// False in programs that `belfry softnic run` did not start, and where its settings are wrong
// (said once): everything then passes through.
bool active();

// The device that a path in /dev/infiniband names; -1 for every other path.
int device_of(const char* path);

// A device file, opened anew. -1 and errno.
int open_device(int device, int flags);
// Null for descriptors that are not device files.
std::shared_ptr<Context> find_context(int fd);

// The same of /dev/infiniband/rdma_cm.
bool is_connection_manager(const char* path);
int open_connection_manager(int flags);
std::shared_ptr<CmChannel> find_cm(int fd);

// Called before the program's descriptor is closed.
void forget_descriptor(int fd);

}  // namespace belfry::uverbs

// The provider around a device that is posted to by calls of a library (fabric, verbs). Each adds
// what its addresses say.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "provider/blob.hpp"
#include "provider/library_queue.hpp"

namespace belfry::provider {

// `Device` is a LibraryDevice with describe(), address(), register_memory(), deregister() and
// close(); `DeviceQueue` its queue.
template <class Device, class DeviceQueue>
class LibraryProvider : public Provider {
 public:
  LibraryProvider(const char* name, const Options& options)
      : device_(std::make_shared<Device>(LibraryDevice::Config{
            name, options.label, options.patience, options.queues, options.gpu})) {
    device_->start();
  }
  ~LibraryProvider() override { device_->stop(); }
  LibraryProvider(const LibraryProvider&) = delete;
  LibraryProvider& operator=(const LibraryProvider&) = delete;

  const char* name() const final { return device_->config().provider; }
  bool device_queues() const final { return false; }
  bool tests_connections() const final { return true; }
  std::string describe() const final { return device_->describe(); }
  Blob address() const final { return blob_of(device_->address()); }

  // Without relaxed ordering, whether or not signals ride it: nothing was measured that asks for
  // it.
  Registration register_memory(void* address, std::size_t bytes, const memory::SharedSegment*,
                               bool) final {
    return device_->register_memory(address, bytes);
  }
  void deregister(std::uint32_t lkey) final { device_->deregister(lkey); }
  void halt() final {
    const std::lock_guard guard(device_->lock);
    device_->close();
  }
  std::unique_ptr<Queue> create_queue(const QueueConfig& config) final {
    return std::make_unique<DeviceQueue>(device_, config);
  }
  std::vector<std::string> take_reports() final { return device_->take_reports(); }
  std::vector<softnic::TraceEvent> take_trace() final { return {}; }

 protected:
  Device& device() const { return *device_; }

 private:
  std::shared_ptr<Device> device_;
};

}  // namespace belfry::provider

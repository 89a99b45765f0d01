// Operations as values: what a put may bring along, and the makers that Net, Batch and the host
// API share. Host and device.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "belfry/queue/command_ring.hpp"

namespace belfry {

// A place in a window: at the peer for a destination, here for a source.
struct Place {
  std::uint32_t window;
  std::uint64_t offset;
};

// Adds `value` to the peer's 64-bit signal `id`.
struct signal_add {
  std::uint32_t id;
  std::uint64_t value;
};
// Adds one.
struct signal_inc {
  std::uint32_t id;
};
// Stores `value`; not atomic with additions by others.
struct signal_set {
  std::uint32_t id;
  std::uint64_t value;
};
// Adds one to the local counter `id` when the source may be reused.
struct counter_inc {
  std::uint32_t id;
};
// The signal covers its own put only; without it a signal is strong.
struct weak_signal {};
// The caller has already released its writes at system scope; no fence is paid again.
struct released {};

namespace op {
namespace detail {

BELFRY_HOST_DEVICE inline void apply(queue::Command& c, signal_add s) {
  c.signal_op = queue::SignalOp::add;
  c.signal_id = s.id;
  c.signal_value = s.value;
}
BELFRY_HOST_DEVICE inline void apply(queue::Command& c, signal_inc s) {
  apply(c, signal_add{s.id, 1});
}
BELFRY_HOST_DEVICE inline void apply(queue::Command& c, signal_set s) {
  c.signal_op = queue::SignalOp::set;
  c.signal_id = s.id;
  c.signal_value = s.value;
}
BELFRY_HOST_DEVICE inline void apply(queue::Command& c, counter_inc s) {
  c.has_counter = true;
  c.counter_id = s.id;
}
BELFRY_HOST_DEVICE inline void apply(queue::Command& c, weak_signal) { c.weak = true; }
BELFRY_HOST_DEVICE inline void apply(queue::Command&, released) {}

// A window number too large for its field becomes one that no table has, so that it is refused.
BELFRY_HOST_DEVICE constexpr std::uint16_t window_field(std::uint32_t window) {
  return static_cast<std::uint16_t>(window < 0xffff ? window : 0xffff);
}

BELFRY_HOST_DEVICE inline queue::Command at(queue::Operation operation, Place dst, Place src) {
  queue::Command c;
  c.operation = operation;
  c.dst_window = window_field(dst.window);
  c.src_window = window_field(src.window);
  c.dst_offset = dst.offset;
  c.src_offset = src.offset;
  return c;
}

}  // namespace detail

// Extras of each: signal_add, signal_inc, signal_set, weak_signal, counter_inc, released.
template <class... Extra>
BELFRY_HOST_DEVICE queue::Command put(Place dst, Place src, std::uint64_t bytes, Extra... extra) {
  queue::Command c = detail::at(queue::Operation::put, dst, src);
  c.bytes = bytes;
  (detail::apply(c, extra), ...);
  return c;
}

template <class T, class... Extra>
BELFRY_HOST_DEVICE queue::Command put_value(Place dst, T value, Extra... extra) {
  static_assert(std::is_trivially_copyable_v<T> &&
                (sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8));
  queue::Command c = detail::at(queue::Operation::put_value, dst, Place{0, 0});
  c.bytes = sizeof(T);
  std::memcpy(&c.value, &value, sizeof(T));
  (detail::apply(c, extra), ...);
  return c;
}

template <class... Extra>
BELFRY_HOST_DEVICE queue::Command put_2d(Place dst, std::uint64_t dst_pitch, Place src,
                                         std::uint64_t src_pitch, std::uint64_t row_bytes,
                                         std::uint32_t rows, Extra... extra) {
  queue::Command c = detail::at(queue::Operation::put_2d, dst, src);
  c.bytes = row_bytes;
  c.rows = rows;
  // Of a single row the pitches mean nothing, and need not fit anywhere.
  c.dst_pitch = rows > 1 ? dst_pitch : 0;
  c.src_pitch = rows > 1 ? src_pitch : 0;
  (detail::apply(c, extra), ...);
  return c;
}

// In a get the command's destination window is the remote one, as in every operation.
template <class... Extra>
BELFRY_HOST_DEVICE queue::Command get(Place dst, Place src, std::uint64_t bytes, Extra... extra) {
  queue::Command c = detail::at(queue::Operation::get, src, dst);
  c.bytes = bytes;
  (detail::apply(c, extra), ...);
  return c;
}

template <class... Extra>
BELFRY_HOST_DEVICE queue::Command signal(Extra... extra) {
  queue::Command c;
  c.operation = queue::Operation::signal;
  (detail::apply(c, extra), ...);
  return c;
}

// Fetching atomics on an 8-byte aligned 8-byte word of the peer's window.
BELFRY_HOST_DEVICE inline queue::Command fetch_add(Place word, std::uint64_t add) {
  queue::Command c = detail::at(queue::Operation::fetch_add, word, Place{0, 0});
  c.bytes = 8;
  c.value = add;
  return c;
}

BELFRY_HOST_DEVICE inline queue::Command compare_swap(Place word, std::uint64_t compare,
                                                      std::uint64_t value) {
  queue::Command c = detail::at(queue::Operation::compare_swap, word, Place{0, 0});
  c.bytes = 8;
  c.value = value;
  // The compare value travels where a put's signal operand does.
  c.signal_value = compare;
  return c;
}

BELFRY_HOST_DEVICE inline queue::Command swap(Place word, std::uint64_t value) {
  queue::Command c = detail::at(queue::Operation::swap, word, Place{0, 0});
  c.bytes = 8;
  c.value = value;
  return c;
}

}  // namespace op
}  // namespace belfry

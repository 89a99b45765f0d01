// One way after another to do what may be refused, and what each said.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "belfry/status.hpp"

namespace belfry::provider {

// What came of trying one way to do something: the thing, or why not.
template <class T>
struct Attempt {
  std::optional<T> value;
  std::string why;

  static Attempt done(T value) { return {std::move(value), {}}; }
  static Attempt failed(std::string why) { return {std::nullopt, std::move(why)}; }
  explicit operator bool() const { return value.has_value(); }
};

template <class T>
struct Way {
  const char* name;
  std::function<Attempt<T>()> go;
};

template <class T>
struct Chosen {
  T value;
  std::string way;
  std::string how;  // "peermem (dmabuf: the driver is too old)"
};

// The first way that works, and why those before it did not. Throws belfry::Error with the reason
// of each when none does.
template <class T>
Chosen<T> first_that_works(const std::string& thing, const std::vector<Way<T>>& ways,
                           const std::string& remedy) {
  std::string refused;
  for (const Way<T>& way : ways) {
    Attempt<T> attempt = way.go();
    if (attempt) {
      return {std::move(*attempt.value), way.name,
              refused.empty() ? way.name : std::string(way.name) + " (" + refused + ")"};
    }
    refused += (refused.empty() ? "" : "; ") + std::string(way.name) + ": " + attempt.why;
  }
  throw Error(thing, refused, "one of them", remedy);
}

}  // namespace belfry::provider

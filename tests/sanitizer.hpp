// Which sanitizer this build has, if any; g++ and clang say it in different words.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define BELFRY_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BELFRY_ADDRESS_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define BELFRY_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define BELFRY_THREAD_SANITIZER 1
#endif
#endif

namespace belfry::test {

#if defined(BELFRY_ADDRESS_SANITIZER)
inline constexpr bool address_sanitizer = true;
#else
inline constexpr bool address_sanitizer = false;
#endif
#if defined(BELFRY_THREAD_SANITIZER)
inline constexpr bool thread_sanitizer = true;
#else
inline constexpr bool thread_sanitizer = false;
#endif
// Memory that was given back stays with a sanitizer for a while.
inline constexpr bool sanitized = address_sanitizer || thread_sanitizer;

}  // namespace belfry::test

// The post and poll operations of programs' contexts, through which the engine also makes
// progress: a program that spins on two cores would starve a thread that does it alone.
#pragma once

struct ibv_context;

namespace belfry::uverbs {

// Puts the engine behind the context's operations. For contexts of ours, before they are used.
void adopt(ibv_context* context);

}  // namespace belfry::uverbs

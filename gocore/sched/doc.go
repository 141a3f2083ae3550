// Package sched holds schedules: the list of small actions that one training step is made of.
//
// # Basics
//
// A [Spec] (a [Chain] of blocks and some options) goes into a generator ([Sequential], [Async], [Pipeline], [Distributed]); a
// [Program] comes out, one pair of action lists per rank. A generator is a pure function: the same spec gives the same bytes.
// [Check] replays a program on symbols and refuses it with the offending action marked. It shares nothing with the generators but
// the Chain, so that a fault in one shows in the other. [Generate], [Validate], [ToCSV] and [FromCSV] are the same things on text,
// for callers in another language.
//
// # Note [What an action reads, makes and frees]
//
// Block b makes boundary b+1; boundary 0 is the step's input and boundary L, the chain's output, is read by the loss, which counts as block
// number L. For every boundary and microbatch:
//
//   - A forward (F, C, N) and a rebuild (R) read every boundary of which their block is a consumer.
//   - A boundary is handed on: it vanishes by itself after its last forward reader. A `C` keeps what it reads, and so does the option
//     keep_output for boundary L; what is kept lives until its `D`, and a `D` is owed.
//   - `S` moves a kept boundary off the device, once and before any rebuild from it; `L` brings it back; nobody reads it in between.
//   - `F` and `R` build a graph, `V` (or `I` and `W`) uses it up. `D` waits for the `V`, not only for the `R`: the graph's saved tensors
//     lie in the boundary's memory.
//   - An adjoint is complete when every consumer that has a VJP has taken it. With passes, `P` runs once on the complete adjoint, before the
//     producer's `V` reads it or `XB` sends it: on the consumers' rank.
//   - Per block, VJPs run in the order of the microbatches, so that gradients add up as plain accumulation adds them. A block that writes
//     buffers runs its forwards in that order too.
//   - `bU*` updates block b's own leaves and every shared group of which b is the first reader that has a VJP, after the last VJP of each reader.
//   - `XF` and `XB` return at once, `YF` and `YB` wait. Between two ranks messages arrive in the order in which they were sent.
//
// # Caveats
//
// A boundary crosses ranks once: all its consumers are on one rank. Blocks are dealt to ranks in order (rank numbers never fall along
// the chain), though ranks may be left out.
package sched

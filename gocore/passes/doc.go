// Package passes transforms gradients on their way back: clipping, casts to small formats, quantization, noise, statistics.
//
// # Basics
//
// A [Pass] reads the gradient of one boundary and writes its transform. A [Chain] is a run of passes applied in one call; it is built
// from text by [NewChain], out of the passes that [Register] knows:
//
//	chain, err := passes.NewChain(`[{"name":"clip","params":{"max_norm":1.0}}, {"name":"int8"}]`)
//	g := &passes.Grad{Src: tensors, LossScale: 65536, Step: 7, Block: 3}
//	err = chain.Apply(&passes.Context{Buffers: pool}, g)   // g.Dst holds the result
//	chain.Close()
//
// The source is never written. The first pass that changes anything reads the source and writes a destination that the chain took from
// [Buffers]; the passes behind it work in place there. Passes that treat each element on its own ([Sweeper]) are run one after the other
// on blocks that fit the first-level cache, so that three casts cost one trip through memory.
//
// # Numbers
//
// Each built-in pass computes what the same line of eager PyTorch computes, in the tensor's own type, with one rounding an operation;
// sums run in float64. Large tensors are cut into chunks of fixed size and partial results are combined in the order of the chunks: no
// result depends on the number of workers. Norms run over all tensors of the boundary together unless the pass is per tensor.
// Thresholds, noise and logged statistics are in unscaled units: what the gradient would be without the loss scale.
//
// A NaN or an infinity is never turned into a number that looks valid: passes that need a norm or a maximum refuse it with
// errs.ErrPass, naming pass, block and tensor; casts and scalings hand it on.
//
// # Caveats
//
// The tensors of a [Grad] are borrowed for the length of the call. A chain's Apply, State and Reports exclude each other; two chains are
// independent. After a failed Apply the state of a pass may have advanced: take State before a step, and SetState it back after a
// failure.
package passes

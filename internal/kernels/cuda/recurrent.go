package cuda

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// A block of recurrent.cu has some samples and as many units, and a thread for each of them. Its
// registers hold the weights of that many units at most.
const (
	lstmSide = 16
	lstmSize = 512
)

// tf32 is what kernels are named for whose products may round f32.
const tf32 = "tf32"

// plain returns the kernel that does without tensor cores what this one may do with them. Devices
// before compute capability 8.0 have that one alone: the other would be its copy.
func (e Entry) plain() Entry {
	if e.Op == tf32 {
		e.Op = "f32"
	}
	return e
}

// unwritten is what recurrent.cu takes for nothing: NaNs that no arithmetic gives.
const unwritten = 0xffffffff

// Recurs reports whether [Kernels.LSTM] and its gradient compute layers of so many units, which
// takes as many blocks as a device must run at a time.
func Recurs(batch, size int) (blocks int, ok bool) {
	return over(batch, lstmSide) * over(size, lstmSide),
		batch > 0 && size > 0 && size%lstmSide == 0 && size <= lstmSize
}

// LSTM computes what [kernels.LSTM] says, all steps in one launch: in f32 on CUDA cores, with a
// fixed order of sums, and else on tensor cores. The device must run all its blocks at a time: see
// [Recurs]. A step of 512 units and 64 samples takes 7 us in f32 and 3 in bf16, the products and
// loops of vm for it 10 (bench/results/2026-11/2026-11-27-h100-lstm.md).
//
// Errors: those of [kernels.Check]; [backend.ErrUnsupported] for sizes that [Recurs] refuses.
func (k Kernels) LSTM(l kernels.LSTM) error {
	if err := check.LSTM(l); err != nil {
		return err
	}
	return k.lstm("lstm", l, l.All, l.Kept, l.Input, l.H0, l.C0)
}

// LSTMGrad computes what [kernels.LSTMGrad] says, as LSTM does.
//
// Errors: as those of LSTM.
func (k Kernels) LSTMGrad(l kernels.LSTMGrad) error {
	if err := check.LSTMGrad(l); err != nil {
		return err
	}
	return k.lstm("lstmgrad", l.LSTM, l.Gates, backend.Buffer{}, l.All, l.Kept, l.DY, l.DC)
}

// lstm fills what blocks exchange, the result or what it is rounded to, and launches.
func (k Kernels) lstm(verb string, l kernels.LSTM, result, kept backend.Buffer,
	operands ...backend.Buffer) error {
	blocks, ok := Recurs(l.Batch, l.Size)
	if !ok {
		return fmt.Errorf("%w: lstm of %d units: multiples of %d up to %d on a device",
			backend.ErrUnsupported, l.Size, lstmSide, lstmSize)
	}
	numbers, exchanged := "f32", result
	if l.TF32 {
		numbers = tf32
	}
	if l.Rounded.Len() > 0 {
		numbers, exchanged = "bf16", l.Rounded
	}
	if err := k.Fill(exchanged, unwritten); err != nil {
		return err
	}
	columns := over(l.Size, lstmSide)
	c := Launch{Entry: Entry{Verb: verb, Op: numbers, Type: "f32"},
		Grid:  Size{uint32(blocks / columns), uint32(columns)},
		Block: Size{lstmSide * lstmSide, 1}}
	c.pass(word(result))
	if kept.Len() > 0 {
		c.pass(word(kept))
	}
	c.pass(word(exchanged))
	for _, b := range operands {
		c.pass(word(b))
	}
	c.pass(word(l.Weights), uint64(l.Steps), uint64(l.Batch), uint64(l.Size), flag(l.Reverse))
	return k.launcher.Launch(c)
}

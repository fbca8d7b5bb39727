package tcp

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// isOneShot reports whether ranks send each other the whole operand of a reduction of nbytes bytes.
func isOneShot(c backend.Collective, nbytes, ranks int) bool {
	switch {
	case c.Algorithm != backend.Auto:
		return c.Algorithm == backend.OneShot
	case ranks == 2:
		return nbytes <= pairBytes
	}
	return nbytes*(ranks-1) <= oneShotBytes
}

// isWhole reports whether the root of a broadcast of nbytes bytes sends all of them to every rank.
func isWhole(nbytes, ranks int) bool { return ranks == 2 || nbytes <= oneShotBytes }

// Chosen names the algorithm of a call of nbytes bytes.
func (e *engine) Chosen(what *backend.Collective, nbytes int) string {
	switch k := what.Kind; {
	case e.Size() > 1 && (k == backend.AllReduce || k == backend.Reduce):
		if !isOneShot(*what, nbytes, e.Size()) {
			return "two-shot"
		}
		return "one-shot"
	case k == backend.Broadcast && !isWhole(nbytes, e.Size()):
		return "in-parts"
	}
	return "direct"
}

// Explain says how a call among ranks on any machines runs, and why. nbytes is the size of the
// operand of a reduction, and of the largest buffer of other collectives. Nothing is run.
//
// Errors: ErrArgument if there is no such call.
func Explain(c backend.Collective, d backend.DType, nbytes, ranks int) (string, error) {
	if !c.Kind.Valid() || !d.Valid() || nbytes < 0 || ranks < 1 {
		return "", fmt.Errorf("%w: %v of %d bytes of %v among %d ranks: there is no such call",
			backend.ErrArgument, c, nbytes, d, ranks)
	}
	call := fmt.Sprintf("%v of %d bytes of %v among %d ranks", c, nbytes, d, ranks)
	if ranks == 1 {
		return call + ": a copy, because there is one rank\n", nil
	}
	switch c.Kind {
	case backend.AllReduce, backend.Reduce:
		return call + ": " + explainReduction(c, nbytes, ranks), nil
	case backend.ReduceScatter:
		return call + ": direct, the only algorithm\n" +
			"  every rank gets the operands of its chunk from all others at once, and adds them " +
			"in rank order as they arrive\n", nil
	case backend.Broadcast:
		return call + ": " + explainBroadcast(nbytes, ranks), nil
	}
	return call + ": direct, the only algorithm\n  every rank sends every other one what that " +
		"one needs, to all at once\n", nil
}

func explainReduction(c backend.Collective, nbytes, ranks int) string {
	name, why := "two-shot", "by its size"
	if isOneShot(c, nbytes, ranks) {
		name = "one-shot"
	}
	if c.Algorithm != backend.Auto {
		why = "as the call asks for"
	}
	upTo, to := oneShotBytes/(ranks-1), "every other one"
	if ranks == 2 {
		upTo = pairBytes
	}
	if c.Kind == backend.Reduce {
		to = "the root"
	}
	return fmt.Sprintf("%s, %s\n"+
		"  one-shot   up to %d bytes: every rank sends %s its operand, in one step\n"+
		"  two-shot   above: every rank adds up a chunk, by segments of %d KiB as they arrive, "+
		"and sends %s the sums\n",
		name, why, upTo, to, segmentBytes>>10, to)
}

func explainBroadcast(nbytes, ranks int) string {
	name, upTo := "in parts, by its size", fmt.Sprintf("up to %d bytes", oneShotBytes)
	if isWhole(nbytes, ranks) {
		name = "whole, by its size"
	}
	if ranks == 2 {
		name, upTo = "whole, because there are two ranks", "always among two ranks"
	}
	return fmt.Sprintf("%s\n"+
		"  whole      %s: the root sends every rank everything\n"+
		"  in parts   else: the root sends every rank a part, which sends it on to the others as "+
		"it arrives\n", name, upTo)
}

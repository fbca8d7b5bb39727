package host

import (
	"fmt"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// algorithm is how a reduction runs.
type algorithm uint8

const (
	oneShot algorithm = iota
	twoShot
	// twoShotOrDirect is direct if the operands of every rank are in memory from Alloc, and
	// two-shot otherwise. The ranks check this, which takes a step.
	twoShotOrDirect
)

// algorithmOf chooses the algorithm of an AllReduce or Reduce of nbytes bytes. It depends only on
// values that are the same on every rank. crowded says that ranks outnumber cores.
func algorithmOf(c *backend.Collective, nbytes, ranks int, crowded bool) algorithm {
	small := oneShotBytes // for all ranks together
	if crowded {
		small = crowdedOneShotBytes
	}
	switch {
	case c.Algorithm == backend.OneShot, c.Algorithm == backend.Auto && nbytes*ranks <= small:
		return oneShot
	case nbytes >= directBytes && c.Kind == backend.AllReduce:
		return twoShotOrDirect
	}
	return twoShot
}

// Explain says which algorithm a call among ranks of one machine uses, and why. nbytes is the size
// of the operand of a reduction, and of the largest buffer of other collectives. It assumes that
// each rank has a core. Nothing is run.
//
// Errors: ErrUnsupported if the backend cannot connect that many ranks, ErrArgument if there is no
// such call.
func Explain(c backend.Collective, d backend.DType, nbytes, ranks int) (string, error) {
	switch {
	case !c.Kind.Valid() || !d.Valid() || nbytes < 0 || ranks < 1:
		return "", fmt.Errorf("%w: %v of %d bytes of %v among %d ranks: there is no such call",
			backend.ErrArgument, c, nbytes, d, ranks)
	case ranks > maxRanks:
		return "", tooMany(ranks)
	}
	call := fmt.Sprintf("%v of %s of %v among %d ranks", c, size(nbytes), d, ranks)
	switch {
	case ranks == 1:
		return call + ": a copy, because there is one rank\n", nil
	case c.Kind != backend.AllReduce && c.Kind != backend.Reduce:
		return fmt.Sprintf("%s: through shared memory, the only algorithm\n  every rank writes "+
			"what others need to its slot of %s, and reads what it needs from theirs\n", call,
			size(rawBytes)), nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n", call, chosen(c, nbytes, ranks))
	fmt.Fprintf(&b, "  one-shot   up to %s (%s for all ranks together, or %s where ranks "+
		"outnumber cores): every rank adds up the operands of all ranks\n",
		size(oneShotBytes/ranks), size(oneShotBytes), size(crowdedOneShotBytes))
	fmt.Fprintf(&b, "  two-shot   above: every rank adds up a part, and all collect the parts, "+
		"through slots of %s\n", size(rawBytes))
	if c.Kind == backend.AllReduce {
		fmt.Fprintf(&b, "  direct     from %s, if every rank's operands come from "+
			"Communicator.Alloc (as autograd's buckets do):\n"+
			"             two-shot that reads the operands where they are, without copies to "+
			"slots\n", size(directBytes))
	}
	return b.String(), nil
}

// Chosen implements [backend.Chooser].
func (c *comm) Chosen(what *backend.Collective, _ backend.DType, nbytes int) string {
	if what.Kind != backend.AllReduce && what.Kind != backend.Reduce {
		return "slots"
	}
	return [...]string{oneShot: "one-shot", twoShot: "two-shot",
		twoShotOrDirect: "direct"}[algorithmOf(what, nbytes, c.size, c.spin.crowded)]
}

// chosen names the algorithm of a reduction, and why it is used.
func chosen(c backend.Collective, nbytes, ranks int) string {
	name := map[algorithm]string{oneShot: "one-shot", twoShot: "two-shot",
		twoShotOrDirect: "direct if memory is from Alloc, else two-shot"}[algorithmOf(&c, nbytes,
		ranks, false)]
	if c.Algorithm != backend.Auto {
		return name + ", as the call asks for"
	}
	return name + ", by its size"
}

// size prints bytes in the largest unit that divides them.
func size(nbytes int) string {
	for _, u := range []struct {
		bytes int
		name  string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if nbytes >= u.bytes && nbytes%u.bytes == 0 {
			return fmt.Sprintf("%d %s", nbytes/u.bytes, u.name)
		}
	}
	return fmt.Sprintf("%d bytes", nbytes)
}

package sparse

import "fmt"

// plan is how a call is sent. It depends only on what all ranks agree on, so it is the same on
// each.
type plan struct {
	layout
	k      int  // of a top-k, 0 for a threshold
	dense  bool // dense fallback: the selected elements are reduced densely, and messages are heads
	wanted int  // entries that messages would need
}

// slack is the number of further entries, beyond those selected, for which a message always has
// room: a kilobyte or less, so that small operands do not wait.
const slack = 64

// planOf plans a call of n elements of P ranks. selected is the most that a rank has selected in
// the last call but one of the same state, -1 if there was none. The last call may be under way,
// and waiting for its count would block the host.
func (o options) planOf(n, P, selected int) plan {
	p := plan{layout: layout{values: o.values}}
	// Each rank receives P-1 messages, or in a dense reduction 2(P-1)/P of the
	// operand as f32.
	most := p.largest(2 * 4 * n / P)
	if o.always {
		most = n
	}
	switch {
	case o.how.density != 0:
		p.k = topK(o.how.density, n)
		p.wanted = p.k
	case !o.feedback: // a threshold promises no capacity, and nothing may be lost
		p.wanted = n
	case selected < 0:
		p.wanted = max(most, 1)
	default: // some more than then; what does not fit waits in the residual
		p.wanted = selected + selected/4 + slack
		if selected <= most {
			p.wanted = min(p.wanted, most)
		}
	}
	p.wanted = min(p.wanted, n)
	if p.dense = p.wanted > most; !p.dense {
		p.capacity = p.wanted
	}
	return p
}

// explain says how a call of n elements of P ranks is sent, and why.
func (p plan) explain(n, P int) string {
	chosen := "sparse"
	if p.dense {
		chosen = "dense"
	}
	messages := p.layout
	messages.capacity = p.wanted
	return fmt.Sprintf("%s: a rank receives %d bytes in messages for %d of %d elements, %d in a "+
		"dense all-reduce",
		chosen, (P-1)*messages.nbytes(), p.wanted, n, 2*(P-1)*4*n/P)
}

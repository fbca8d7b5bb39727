package backend

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"strings"
	"unicode"
)

// Purpose says what the program called to start a collective. Ranks compare it, and errors print
// it: "DataParallel.Save" says more than "allgather of 40 u8".
type Purpose uint8

// The purposes. A number keeps its meaning: new ones are added at the end.
const (
	forCaller Purpose = iota // the program started the collective itself
	ForGraph                 // a node of a graph, by package ops
	// the gradient of a node, in a machine that makes no nodes for gradients
	ForGradient
	forBarrier    // Barrier
	ForAlloc      // Communicator.Alloc
	ForSplit      // Communicator.Split
	forConnect    // Backend.Connect
	ForNew        // autograd.New
	ForSync       // DataParallel.Sync
	ForAverage    // DataParallel.Average and AverageAll
	ForCheck      // DataParallel.Check
	ForSave       // DataParallel.Save
	ForLoad       // DataParallel.Load
	ForMean       // autograd.Mean
	ForSum        // autograd.Sum
	ForAny        // autograd.Any
	ForReplay     // Graph.Launch
	ForMachine    // vm.New
	ForSampler    // autograd.NewSampler
	ForEvaluation // autograd.Evaluation
	ForGather     // autograd.Gather
	ForPull       // vm.Machine.Pull, and methods that pull: Averaged and Close
	ForStopped    // autograd.Stopped
)

var purposes = [...]string{
	forCaller: "a collective", ForGraph: "a node of a graph", ForGradient: "the gradient of a node",
	forBarrier: "Barrier",
	ForAlloc:   "Alloc", ForSplit: "Split", forConnect: "Connect",
	ForNew: "autograd.New", ForSync: "DataParallel.Sync", ForAverage: "DataParallel.Average",
	ForCheck: "DataParallel.Check",
	ForSave:  "DataParallel.Save", ForLoad: "DataParallel.Load",
	ForMean: "autograd.Mean", ForSum: "autograd.Sum", ForAny: "autograd.Any",
	ForReplay:  "Graph.Launch",
	ForMachine: "vm.New", ForSampler: "autograd.NewSampler", ForEvaluation: "autograd.Evaluation",
	ForGather: "autograd.Gather", ForPull: "vm.Machine.Pull, Averaged or Close",
	ForStopped: "autograd.Stopped",
}

// String returns the name of what the program called: "DataParallel.Save".
func (p Purpose) String() string {
	if int(p) >= len(purposes) {
		return fmt.Sprintf("Purpose(%d)", uint8(p))
	}
	return purposes[p]
}

// method reports whether p is a function or method that programs call by its name, so that a
// rank may have called it alone.
func (p Purpose) method() bool { return p > ForGradient && int(p) < len(purposes) }

// everywhere reports whether p is called only now and then. A difference then means that a rank did
// not call it. A Sync on another rank only says what that rank is doing meanwhile.
func (p Purpose) everywhere() bool { return p.method() && p != ForSync }

// Origin says which place of a program a collective comes from. It tells apart calls that are
// otherwise alike, such as two sums of the same number of elements. The zero value says nothing.
type Origin struct {
	Purpose Purpose
	// Ordinal counts, from 1, the collectives of a graph on a communicator, or the buckets of a
	// DataParallel. 0 means not counted.
	Ordinal uint32
	// Name and Shape describe the operand, where they are the same on every rank.
	Name  Name
	Shape Shape
	// Cut and Join are the axes along which the operand is cut and the result is joined, counted
	// from 1. 0 means that it is not cut or joined.
	Cut, Join uint8
}

// along says which axes are cut and joined.
func (o *Origin) along() string {
	switch cut, join := int(o.Cut)-1, int(o.Join)-1; {
	case cut >= 0 && join >= 0:
		return fmt.Sprintf(" along axes %d→%d", cut, join)
	case cut >= 0:
		return fmt.Sprintf(" along axis %d", cut)
	case join >= 0:
		return fmt.Sprintf(" along axis %d", join)
	}
	return ""
}

// where says where in the program the call is from.
func (o *Origin) where() string {
	n := o.Ordinal
	switch {
	case n == 0:
		return ""
	case o.Purpose == ForGraph:
		return fmt.Sprintf(", collective %d of its graph", n)
	case o.Purpose == ForGradient:
		return fmt.Sprintf(", for the gradient of collective %d of its graph", n)
	case o.Shape.kind == hashedLayout:
		return fmt.Sprintf(", bucket %d %v", n-1, o.Shape)
	}
	return fmt.Sprintf(", number %d", n)
}

// Original is the call that a wrapper was asked for, kept in the call that the wrapper starts
// instead. It reveals ranks that were asked for different things. The zero value means that the
// call stands for itself.
type Original struct {
	Op    ReduceOp
	DType DType
	// Transport is the dtype that operands are rounded to for the transport; 0 if the call's own
	// dtype says so.
	Transport DType
	// Hash is a hash of the whole header, if the call carries a part of another collective.
	Hash uint64
}

// Label returns comm with purpose as the Origin of all calls that have none. Use it in a function
// that makes several calls for one purpose; do not close it.
func Label(comm Communicator, purpose Purpose) Communicator {
	return labelled{Wrap(comm), &Origin{Purpose: purpose}}
}

type labelled struct {
	Base
	origin *Origin
}

// Start implements [Communicator].
func (l labelled) Start(q Queue, c Collective, dst, src Buffer) (Work, error) {
	if c.Origin == nil {
		c.Origin = l.origin
	}
	return l.Base.Start(q, c, dst, src)
}

// nameBytes is how long a Name may be.
const nameBytes = 32

// Name is the name of an operand in a fixed size. The zero value is no name.
type Name [nameBytes]byte

// MakeName returns a name. One of more than 32 bytes is cut, and ends with a hash of the whole.
func MakeName(s string) (n Name) {
	if len(s) > nameBytes {
		h := fnv.New32a()
		h.Write([]byte(s)) // never fails
		hash := fmt.Sprintf("#%08x", h.Sum32())
		s = s[:nameBytes-len(hash)] + hash
	}
	copy(n[:], s)
	return n
}

// String returns the name. Unprintable characters become question marks: the name may come from
// another rank.
func (n Name) String() string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.TrimRight(string(n[:]), "\x00"))
}

// shownAxes is the number of axes that a Shape holds without hashing.
const shownAxes = 6

// Shape is a tensor's shape in a fixed size: the lengths of its axes, or a hash of them
// where they do not fit. The zero value is an unknown shape.
type Shape struct {
	// kind is 1 + the number of axes, or hashedAxes or hashedLayout.
	kind uint8
	axes [shownAxes]uint32 // or a hash, in the first two
}

const (
	hashedAxes   = 255
	hashedLayout = 254
)

// ShapeOf returns the shape with axes of the given lengths. It keeps up to six axes of up to 2^32-1
// elements exactly.
func ShapeOf(axes ...int) Shape {
	s := Shape{kind: uint8(1 + len(axes))}
	fits := len(axes) <= shownAxes
	for i := 0; fits && i < len(axes); i++ {
		fits = uint64(axes[i]) <= math.MaxUint32
		s.axes[i] = uint32(axes[i])
	}
	if fits {
		return s
	}
	return hashed(hashedAxes, fmt.Sprint(axes))
}

// LayoutOf returns a hash, in place of a shape, for an operand that holds several tensors and is
// described by description.
func LayoutOf(description string) Shape { return hashed(hashedLayout, description) }

func hashed(kind uint8, text string) Shape {
	h := fnv.New64a()
	h.Write([]byte(text)) // never fails
	return Shape{kind, [shownAxes]uint32{uint32(h.Sum64()), uint32(h.Sum64() >> 32)}}
}

// String returns "(4, 6)", or a hash: "(axes #1a2b3c4d)", or "#1a2b3c4d" for a layout.
func (s Shape) String() string {
	switch {
	case s.kind == 0:
		return "(unknown)"
	case s.kind == hashedLayout:
		return fmt.Sprintf("#%08x", s.axes[0])
	case s.kind > 1+shownAxes:
		return fmt.Sprintf("(axes #%08x)", s.axes[0])
	}
	var text strings.Builder
	for i, n := range s.axes[:s.kind-1] {
		if i > 0 {
			text.WriteString(", ")
		}
		fmt.Fprint(&text, n)
	}
	return "(" + text.String() + ")"
}

// known reports whether there are axes, or a hash of them, to print.
func (s Shape) known() bool { return s.kind != 0 && s.kind != hashedLayout }

// encode encodes the axes.
func (s *Shape) encode(b []byte) {
	for i, n := range s.axes {
		binary.LittleEndian.PutUint32(b[4*i:], n)
	}
}

// get decodes the axes.
func (s *Shape) get(b []byte) {
	for i := range s.axes {
		s.axes[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
}

package host

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// call copies the operands to where the operation has them, runs it, and copies its result.
func call(s *step, o Opaque) (func() error, error) {
	loops := make([]fuse.Loop, len(s.Args))
	to := make([]backend.Buffer, len(s.Args))
	for i, a := range s.Args {
		l, err := copies(a, a.Shape.Strides())
		if err != nil {
			return nil, err
		}
		loops[i], to[i] = l, o.Arg(i)
	}
	return func() error {
		for i, l := range loops {
			if err := l.Run(to[i:i+1], s.args[i:i+1], backend.Buffer{}); err != nil {
				return err
			}
		}
		result, err := o.Call()
		if err != nil {
			return err
		}
		if dst := s.dsts[0]; result.DType() != dst.DType() || result.Len() != dst.Len() {
			return fmt.Errorf("Do gives %d elements of %v, the graph was built for %d of %v", result.Len(), result.DType(), dst.Len(), dst.DType())
		}
		copy(s.dsts[0].Bytes(), result.Bytes())
		return nil
	}, nil
}

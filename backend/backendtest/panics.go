package backendtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// panics has a call of the last rank panic, for each of some calls that do so in some
// implementations. The others end soon with its text, the panic goes on, and Close returns.
func (s *suite) panics(P int) error {
	all := backend.Collective{Kind: backend.AllToAll, Splits: make([]int, P*P)}
	for i := range all.Splits {
		all.Splits[i] = 3
	}
	for _, what := range []backend.Collective{all, {Kind: backend.AllReduce}} {
		panicked := make([]bool, P) // what each rank knows
		first := 0
		err := s.with(P, patient, func(g *Group) error {
			first = g.Comms[0].Rank()
			return s.each(g.Comms, func(c backend.Communicator) (err error) {
				if c.Rank() != P-1 {
					panicked[c.Rank()], err = s.besidePanic(c, what)
					return err
				}
				v, err := s.panicking(c, what)
				said := int64(0)
				if panicked[c.Rank()] = v != nil; v != nil {
					said = time.Now().UnixNano()
				}
				return errors.Join(err, s.tell("its panic", c.Rank(), said))
			})
		})
		if err != nil {
			return fmt.Errorf("a panic in %v: %w", what, err)
		}
		if panicked[first] {
			return nil
		}
	}
	return errSkip("no call that this suite knows of panics")
}

// panicking runs a call that says it was checked, but whose buffer is too short, in larger memory.
// It returns what that panics with.
func (s *suite) panicking(c backend.Communicator, what backend.Collective) (v any, err error) {
	n := 3 * c.Size()
	err = s.vectors(c, 2, n, func(vs []*vector) (err error) {
		defer func() { v = recover() }()
		dst, src := vs[0].buffer().Slice(0, n), vs[1].buffer().Slice(0, n)
		count := n
		if what.Kind == backend.AllToAll {
			count, src = total(what.Splits), src.Slice(0, 2)
		} else {
			dst = dst.Slice(0, 2)
		}
		base := backend.Wrap(c)
		w, err := base.Pass(nil, what, count, dst, src)
		if err == nil {
			err = w.Join(context.Background())
		}
		// it has checked the call again, perhaps when others had begun
		if err != nil && strings.Contains(err.Error(), backend.ErrArgument.Error()) {
			c.Abort(err)
			return nil
		}
		return err
	})
	if v == nil {
		return nil, err
	}
	if err := ended(c, c.Err(), backend.ErrAborted, fmt.Sprint(v)); err != nil {
		return v, fmt.Errorf("the rank that panicked: %w", err)
	}
	return v, c.Close() // as a deferred one, while others may still wait
}

// besidePanic runs a call beside that of a rank which panics.
func (s *suite) besidePanic(c backend.Communicator, what backend.Collective) (panicked bool,
	err error) {
	n := 3 * c.Size()
	var call error
	err = s.vectors(c, 2, n, func(vs []*vector) error {
		call = backend.Run(c, what, vs[0].buffer().Slice(0, n), vs[1].buffer().Slice(0, n))
		return nil
	})
	returned := time.Now()
	said, unheard := s.hear("its panic", c.Size()-1)
	if err = errors.Join(err, unheard); err != nil || said[0] == 0 {
		return false, err
	}
	if took := returned.Sub(time.Unix(0, said[0])); took > soon {
		return true, fmt.Errorf("the call returned %v after the panic", took)
	}
	for _, text := range []string{"panicked in " + what.Kind.String(),
		fmt.Sprintf("rank %d", c.Size()-1)} {
		err = errors.Join(err, ended(c, call, backend.ErrAborted, text))
	}
	return true, err
}

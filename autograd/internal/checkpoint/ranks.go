package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
)

// Ranks are the ranks that save and load together, as one of them sees them.
type Ranks struct {
	Data  backend.Communicator // of the ranks that have the same tensors
	Parts backend.Communicator // of those that have other parts of the same tensors, nil for none
}

// First reports whether this rank writes what all ranks have in common, and decides for all.
func (g Ranks) First() bool { return g.Data.Rank() == 0 && (g.Parts == nil || g.Parts.Rank() == 0) }

// Number is the number of this rank among all.
func (g Ranks) Number() int {
	if g.Parts == nil {
		return g.Data.Rank()
	}
	return g.Parts.Rank()*g.Data.Size() + g.Data.Rank()
}

// Agree returns an error on all ranks if one has a problem, or if those of Data have different
// descriptions: see [group.Alike].
func (g Ranks) Agree(description string, problem error) error {
	_, err := group.Alike(g.Data, description, nil, problem)
	if g.Parts != nil {
		_, err = group.Alike(g.Parts, "", nil, err)
	}
	return err
}

// comms returns the communicators that carry the first rank's decision to all ranks, in this order.
func (g Ranks) comms() (all []backend.Communicator) {
	if g.Parts != nil {
		all = append(all, g.Parts)
	}
	if g.Data.Size() > 1 {
		all = append(all, g.Data)
	}
	return all
}

// spread gives all ranks what merge makes of the values of all.
func spread[T any](g Ranks, value T, merge func(all []T) T) (T, error) {
	for _, comm := range g.comms() {
		members := comm.Capabilities().Members
		all, err := group.Exchange(group.FramedOver(comm), members, value)
		if err != nil {
			return value, err
		}
		value = merge(all)
	}
	return value, nil
}

// anywhere reports whether a condition holds on any rank.
func (g Ranks) anywhere(is bool) (bool, error) {
	return spread(g, is, func(all []bool) bool { return slices.Contains(all, true) })
}

// files returns the files that all ranks have written: those in common, and each rank's own file,
// if it has a name.
func (g Ranks) files(common []File, own File) ([]File, error) {
	files, err := spread(g, []File{own}, func(all [][]File) []File { return slices.Concat(all...) })
	files = slices.DeleteFunc(files, func(f File) bool { return f.Name == "" })
	return append(common, files...), err
}

// decision is what the first rank tells the others.
type decision struct {
	Text, Problem   string
	Missing, Locked bool // what the problem is
}

// decide runs f on the first rank and returns its result on all. The others return an error with
// the same text, and the same fs.ErrNotExist or ErrLocked.
func (g Ranks) decide(f func() (string, error)) (string, error) {
	var is decision
	var err error
	if g.First() {
		if is.Text, err = f(); err != nil {
			if len(g.comms()) > 0 {
				err = fmt.Errorf("rank 0 cannot go on: %w", err)
			}
			is = decision{
				Problem: err.Error(),
				Missing: errors.Is(err, fs.ErrNotExist), Locked: errors.Is(err, ErrLocked),
			}
		}
	}
	is, lost := spread(g, is, func(all []decision) decision { return all[0] })
	if lost != nil {
		return "", errors.Join(err, lost)
	}
	if err != nil || is.Problem == "" {
		return is.Text, err
	}
	return "", is
}

// Error says what the problem of rank 0 is.
func (is decision) Error() string { return is.Problem }

// Is reports whether that is the problem.
func (is decision) Is(target error) bool {
	return target == fs.ErrNotExist && is.Missing || target == ErrLocked && is.Locked
}

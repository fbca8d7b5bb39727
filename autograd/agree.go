package autograd

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
)

// problem is the prefix of the description of a rank that cannot continue.
const problem = "error: "

// Agree returns an error on every rank unless all ranks pass the same description, which may have
// several lines, and none has a problem. The error names a rank and its problem, or the first line
// that differs, as a [backend.ErrMismatch]. It is collective; a rank with a problem takes part, so
// that no rank waits for it. Cost: an all-gather of 32 bytes if ranks agree.
func Agree(comm backend.Communicator, description string, problem error) error {
	if err := backend.Given("autograd.Agree", "comm", comm); err != nil {
		return errors.Join(problem, err)
	}
	err := residence.Bound(comm.Device(), func() error { return agree(comm, description, problem) })
	if err != nil && err != problem {
		return wrapped("rank %d of %s: %w", comm.Rank(), comm.Name(), err)
	}
	return err
}

// agree returns an error on every rank unless all descriptions are the same and no rank has a
// problem. The error names the rank and what differs. A rank with a problem takes part, so that
// no rank waits for it.
//
// Ranks compare hashes, and exchange descriptions only if the hashes differ.
func agree(comm backend.Communicator, description string, wrong error) error {
	_, err := agreeAndGather(comm, description, nil, wrong)
	return err
}

// agreeAndGather is agree, and also sends each rank's note and returns all notes, or none on a
// single rank. All notes have the same length.
func agreeAndGather(comm backend.Communicator, description string, note []byte,
	wrong error) ([][]byte, error) {
	if comm.Size() == 1 {
		return nil, wrong
	}
	if wrong != nil {
		description = problem + wrong.Error()
	}
	sum := sha256.Sum256([]byte(description))
	notes, err := gather(comm, append(sum[:], note...))
	if err != nil {
		return nil, errors.Join(wrong, err)
	}
	first := notes[0][:len(sum)]
	differs := func(theirs []byte) bool { return !bytes.HasPrefix(theirs, first) }
	if !slices.ContainsFunc(notes, differs) {
		for r := range notes {
			notes[r] = notes[r][len(sum):]
		}
		return notes, wrong
	}
	texts, err := framed(comm)([]byte(description))
	if err != nil {
		return nil, errors.Join(wrong, err)
	}
	return nil, disagreement(texts, comm.Rank(), wrong)
}

// framed is gather for notes of any lengths.
func framed(comm backend.Communicator) group.Gatherer {
	return group.Framed(math.MaxInt, func(note []byte) ([][]byte, error) {
		return gather(comm, note)
	})
}

// gather returns the notes of all ranks, which must be of the same length.
func gather(comm backend.Communicator, note []byte) ([][]byte, error) {
	all := make([]byte, comm.Size()*len(note))
	c := backend.Collective{Kind: backend.AllGather}
	err := group.RunOnHost(comm, c, backend.Of(all), backend.Of(note))
	if err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(all, len(note))), nil
}

// disagreement returns an error that says what differs between ranks. wrong is the problem of
// rank mine, if it has one.
func disagreement(texts [][]byte, mine int, wrong error) error {
	lines := make([][]string, len(texts))
	for r, text := range texts {
		t := string(text)
		if why, bad := strings.CutPrefix(t, problem); bad {
			if r == mine { // say it once
				return fmt.Errorf("rank %d cannot go on: %w", r, wrong)
			}
			return errors.Join(wrong, fmt.Errorf("rank %d cannot go on: %s", r, why))
		}
		lines[r] = strings.Split(strings.TrimSuffix(t, "\n"), "\n")
	}
	for r := range lines {
		for i := range max(len(lines[0]), len(lines[r])) {
			if a, b := line(lines[0], i), line(lines[r], i); a != b {
				return fmt.Errorf("%w: %s on rank 0, but %s on rank %d: every rank must pass the "+
					"same parameters in the same order, and the same options",
					backend.ErrMismatch, a, b, r)
			}
		}
	}
	return nil
}

func line(lines []string, i int) string {
	if i >= len(lines) {
		return "nothing"
	}
	return lines[i]
}

// prefix is what errors of the package begin with.
const prefix = "autograd: "

// wrapped is fmt.Errorf for an error that may come from this package: its prefix appears only once.
func wrapped(format string, args ...any) error { return once{fmt.Errorf(format, args...)} }

type once struct{ error }

func (e once) Error() string { return prefix + strings.ReplaceAll(e.error.Error(), prefix, "") }
func (e once) Unwrap() error { return e.error }

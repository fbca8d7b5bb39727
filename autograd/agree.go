package autograd

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// problem begins the description of a rank that cannot go on.
const problem = "error: "

// agree fails on every rank, and names the rank and what it has, unless the
// descriptions of all ranks are the same and none of them has a problem. A
// rank with a problem takes part, so that nobody waits for it.
//
// Ranks compare hashes; only if these differ they exchange descriptions.
func agree(comm backend.Communicator, description string, wrong error) error {
	if comm.Size() == 1 {
		return wrong
	}
	if wrong != nil {
		description = problem + wrong.Error()
	}
	sum := sha256.Sum256([]byte(description))
	notes, err := gather(comm, binary.LittleEndian.AppendUint64(sum[:], uint64(len(description))))
	if err != nil {
		return errors.Join(wrong, err)
	}
	longest, same := 0, true
	for _, note := range notes {
		same = same && slices.Equal(note, notes[0])
		longest = max(longest, int(binary.LittleEndian.Uint64(note[sha256.Size:])))
	}
	if same {
		return wrong
	}
	texts, err := gather(comm, append([]byte(description), make([]byte, longest-len(description))...))
	if err != nil {
		return errors.Join(wrong, err)
	}
	return disagreement(texts, comm.Rank(), wrong)
}

// gather returns the notes of all ranks, which must be of the same length.
func gather(comm backend.Communicator, note []byte) ([][]byte, error) {
	all := make([]byte, comm.Size()*len(note))
	err := exchange(comm, backend.Collective{Kind: backend.AllGather}, backend.Of(all), backend.Of(note))
	if err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(all, len(note))), nil
}

// disagreement says what is not the same on all ranks. wrong is the problem of rank mine, if
// it has one.
func disagreement(texts [][]byte, mine int, wrong error) error {
	lines := make([][]string, len(texts))
	for r, text := range texts {
		t := strings.TrimRight(string(text), "\x00")
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
				return fmt.Errorf("%w: %s on rank 0, but %s on rank %d: every rank must pass the same parameters in the same order, and the same options",
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

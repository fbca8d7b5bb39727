package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/models/texts"
)

// documents returns samples of documents, so many of each; those of conversations have a token that
// is no target.
func documents(conversations bool, sizes ...int) (samples []texts.Sample) {
	for document, n := range sizes {
		for range n {
			s := texts.Sample{Tokens: make([]int, 2), Targets: make([]int, 2), Document: document}
			if conversations {
				s.Targets[0] = texts.Ignored
			}
			samples = append(samples, s)
		}
	}
	return samples
}

// TestConversationsAreHeldOutWholeAndFromAllFiles: a tenth of the samples, no document of which is
// in the training.
func TestConversationsAreHeldOutWholeAndFromAllFiles(t *testing.T) {
	sizes := make([]int, 200)
	for i := range sizes {
		sizes[i] = 1 + i%4
	}
	samples := documents(true, sizes...)
	training, heldOut := divided(samples)
	_, again := divided(samples)
	require.Equal(t, "drawn again", fmt.Sprint(again), fmt.Sprint(heldOut))
	require.That(t, len(training)+len(heldOut) == 500 && len(heldOut) == 50, "%d of 500 are held "+
		"out, and %d trained on", len(heldOut), len(training))
	trained, quarters := map[int]bool{}, map[int]bool{}
	for _, s := range training {
		trained[s.Document] = true
	}
	for _, s := range heldOut {
		quarters[s.Document/50] = true
		require.Check(t, !trained[s.Document], "document %d is on both sides", s.Document)
	}
	require.Equal(t, "quarters of the documents that are held out", len(quarters), 4)
}

// TestALongTextIsHeldOutInPartsAndALongConversationNot: since answers would be on both sides.
func TestALongTextIsHeldOutInPartsAndALongConversationNot(t *testing.T) {
	_, heldOut := divided(documents(false, 50, 50))
	of := map[int]int{}
	for _, s := range heldOut {
		of[s.Document]++
	}
	require.Check(t, len(heldOut) == 10 && len(of) == 2, "of two texts are held out %v", of)
	_, heldOut = divided(documents(true, 50, 50))
	require.Equal(t, "held-out samples of two conversations", len(heldOut), 0)
}

// TestPackedSamplesAreEvaluatedOfAllLengths: and not the longest ones, which Pack has first.
func TestPackedSamplesAreEvaluatedOfAllLengths(t *testing.T) {
	path := filepath.Join(t.TempDir(), "texts.jsonl")
	var lines strings.Builder
	for i := range 800 { // more than half of the context each
		fmt.Fprintf(&lines, "{\"text\": %q}\n", strings.Repeat("a ", 33+i%30))
	}
	require.NoError(t, os.WriteFile(path, []byte(lines.String()), 0o666))
	of := trainer{folder: folder, context: 130, batch: 1, pack: true, data: []string{path},
		comm: autograd.Solo()}
	of.read()
	lengths := map[int]bool{}
	for _, s := range of.heldOut {
		lengths[len(s.Tokens)] = true
	}
	require.Check(t, len(of.heldOut) == evalBatches && len(lengths) > evalBatches/2,
		"%d samples of the lengths %v are evaluated", len(of.heldOut), lengths)
}

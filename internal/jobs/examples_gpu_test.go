//go:build gpu

package jobs_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// exampleLines are small trainings, TEXT being a file and OUT a folder that is not there.
var exampleLines = []string{
	"finetune ../../models/testdata/llama3 --data TEXT --out OUT --context 15 --batch 4 --steps 4",
	"finetune ../../models/testdata/llama3 --data TEXT --out OUT --context 15 --batch 4 " +
		"--steps 4 --lora 2 --tp 2",
	"finetune ../../models/testdata/llama3 --data TEXT --out OUT --context 15 --batch 4 " +
		"--steps 4 --shards 3",
	"generate ../../models/testdata/llama3 --prompt the --max 8 --tp 2",
	"gpt --data TEXT --layers 1 --width 32 --heads 4 --context 11 --steps 4 --shards 3",
	"charlstm --characters 2000 --hidden 8 --steps 9 --batch 4 --epochs 1",
	"moe --experts 4 --hidden 8 --layers 1 --width 16 --context 2 --batch 8 --epochs 1 --steps 3",
	"recommender --users 500 --items 200 --width 8 --batch 64 --negatives 10 --epochs 1 --steps 10",
	"resnet --filters 4 --images 32 --batch 16 --epochs 1",
	"digits --epochs 1", "convnet --epochs 1", "allreduce", "gradient",
}

// TestExamplesLeaveNothingOnADeviceOnGPU: closing a device says what was not freed, which ends a
// program with an error after all of its work.
func TestExamplesLeaveNothingOnADeviceOnGPU(t *testing.T) {
	onGPUs(t)
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("examples are built with Go, which is not here")
	}
	lines, dir := exampleLines, t.TempDir()
	if testing.Short() {
		lines = lines[:1]
	}
	text := filepath.Join(dir, "text")
	require.NoError(t, os.WriteFile(text, bytes.Repeat([]byte("the quick brown fox.\n"), 200),
		0o666))
	for _, line := range lines {
		out := require.Value(os.MkdirTemp(dir, ""))(t)
		args := strings.Fields(strings.NewReplacer("TEXT", text, "OUT",
			filepath.Join(out, "model")).Replace(line))
		program := filepath.Join(dir, args[0])
		if _, err := os.Stat(program); err != nil {
			said, err := exec.Command(tool, "build", "-tags", "gpu", "-ldflags=-s -w", "-o",
				program, "../../examples/"+args[0]).CombinedOutput()
			require.That(t, err == nil, "%s: %v: %s", args[0], err, said)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		var said bytes.Buffer
		err := launch.Run(ctx, launch.Job{Program: program, Ranks: 2, Args: args[1:], Stdout: &said,
			Stderr: &said})
		cancel()
		require.Check(t, err == nil, "%s: %v: %s", line, err, &said)
	}
}

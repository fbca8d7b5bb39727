// Package checkpoint saves the checkpoints of a training on all ranks, and loads them, in a
// directory that is the user's: tensors by names, in files. It knows nothing of models and solvers.
// Each rank lists what it has ([Content]), and which elements of a tensor these are ([Region]).
// docs/checkpoints.md says what users may rely on.
//
// In [Saver.Save] the ranks agree that all can save ([Ranks]), and the first one makes a [Draft], a
// directory with the id of the Save in its name ([Acquire], [Clean], [Begin]). Each rank writes its
// files there ([Write]), in the background if the training goes on. Once all have, one rename by
// [Commit] makes the draft a checkpoint, and [Prune] removes older ones. [Discard] removes a draft.
//
// In [Saver.Load] the first rank takes the first whole [Entry] of [List], until all ranks can read
// what they want of its tensors, in whatever files their elements are ([Read]).
//
// A [Tensor] is named by the program's variables, never by its place among them. Its [Merge] says
// what the elements of several ranks are together. What is not finite is neither written nor read.
//
// Three rules keep the user's files:
//   - Commit renames to a name that does not exist.
//   - What is removed was made by Save, and says so: a draft contains a marker or a record with the
//     id in its name; a checkpoint's record has its training and its name, and lists every file.
//   - Files are removed one by one, by the names that Save gives, and then the empty directory.
//     Symlinks are not followed.
package checkpoint

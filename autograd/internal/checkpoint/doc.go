// Package checkpoint keeps checkpoints in a directory that is the user's: tensors by names, in
// files. It knows nothing of models and solvers, and of ranks only which elements of a tensor each
// has ([Region]). docs/checkpoints.md says what users may rely on.
//
// A Save calls [Acquire], [Clean], [Begin], then [Write] on each rank, and [Commit]; then [Prune].
// Between Begin and Commit the files are in a [Draft], a directory with the id of the Save in its
// name. One rename by Commit makes it a checkpoint. [Discard] removes a draft.
//
// Load calls [List] and takes the first whole [Entry], and [Read] returns what it wants of its
// tensors, in whatever files their elements are.
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

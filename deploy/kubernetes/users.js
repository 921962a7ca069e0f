// Starts the replica set and creates the users of a run: `mongosh --nodb users.js`.
// MONGO_HOST, RUN_NAME and the passwords come from the environment, because arguments are visible.
const env = process.env;
const password = encodeURIComponent(env.MONGO_PASSWORD);
const admin = new Mongo(
  `mongodb://root:${password}@${env.MONGO_HOST}/admin?directConnection=true`
).getDB("admin");

try {
  admin.runCommand({ replSetGetStatus: 1 });
} catch (error) {
  if (error.codeName !== "NotYetInitialized") throw error;
  const members = [{ _id: 0, host: env.MONGO_HOST }];
  admin.runCommand({ replSetInitiate: { _id: "rs0", members } });
}
while (!admin.hello().isWritablePrimary) sleep(500);

// The trainer owns the run's collections and their indexes; the others write documents, and KEDA counts.
const roles = {
  trainer: ["readWrite", "dbAdmin"],
  sampler: ["readWrite"],
  server: ["readWrite"],
  keda: ["read"],
};
for (const [name, given] of Object.entries(roles)) {
  const pwd = env[`${name.toUpperCase()}_PASSWORD`];
  if (!pwd) continue;
  const rights = given.map((role) => ({ role, db: env.RUN_NAME }));
  const command = admin.getUser(name) ? "updateUser" : "createUser";
  admin.runCommand({ [command]: name, pwd, roles: rights });
}
